/** Sample texts by source language, the same as in `simulmt demo`. */

const SAMPLES = {
  en: `Good morning, everyone, and welcome to our school.
My name is Anna, and I am a teacher.
Today I would like to talk about languages.
Learning a new language is not easy.
Last year, 40 percent of our students came from China.
The course takes 12 weeks and costs 300 dollars.
You do not need to be afraid of making mistakes.
Computers can help us, but they cannot replace teachers.
If you have any questions, please raise your hand.
Let's take a break and have some tea.`,
  de: `Guten Morgen, und herzlich willkommen in unserer Schule.
Mein Name ist Anna, und ich bin Lehrerin.
Heute möchte ich über Sprachen sprechen.
Es ist nicht einfach, eine neue Sprache zu lernen.
Der Kurs dauert 12 Wochen und kostet 300 Euro.
Wenn Sie Fragen haben, heben Sie bitte die Hand.
Vielen Dank für Ihre Aufmerksamkeit.`,
  synthetic: `dis kode rillis las gul mivan kovan du don Korsar barrer solbal felfun kaden .
va tis runpes popir du gu verrer ropur san don Fanman .
bo suslol fomin las kolta fusu nol dis tevir vastol runpes mapes nol don Tonrar .
felfun nolbos faltin mirgus fisfi kallil .
gul nudon bulvo nerbos kinrus , mil don Papal tanen gul pudos si gul mapes .`,
};

/** @param {string} language @returns {string | undefined} */
export function sampleFor(language) {
  return SAMPLES[language];
}
