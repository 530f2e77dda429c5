/** Sample texts by source language, the same as in `simulmt demo`. */

const SAMPLES = {
  en: `Good morning, and thank you all for coming.
Today I would like to talk about water.
Many people in the world do not have clean water.
When I was a child, we had no water in the house.
Ten years ago, we built a small pump that runs on sunlight.
It is not expensive, and everyone in the village can use it.
Since then, my sister has become a teacher, and nobody has to carry water anymore.
If you have any questions, please ask me after the talk.`,
  de: `Guten Morgen zusammen, und vielen Dank, dass Sie gekommen sind.
Heute möchte ich über Wasser sprechen.
Zwei Milliarden Menschen auf der Welt haben zu Hause kein sauberes Wasser.
Als ich ein Kind war, lag der nächste Brunnen drei Kilometer entfernt, und meine Schwester ging jeden Morgen vor der Schule dorthin.
Vor zehn Jahren haben wir eine kleine Pumpe gebaut, die mit Sonnenlicht läuft.
Sie ist nicht teuer, und jeder im Dorf kann sie reparieren.
Inzwischen ist meine Schwester Lehrerin geworden, und niemand muss mehr Wasser tragen.
Wenn Sie Fragen haben, stellen Sie sie bitte nach dem Vortrag.`,
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
