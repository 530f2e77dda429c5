/** Something to play, by source language. */

const SAMPLES = {
  en: `Thank you all for coming out on such a wet evening.
Before we begin, I would like to tell you how this orchard came to be here.
My grandmother planted the first tree in the spring after the flood, and everybody in the village laughed at her.
The ground was full of stones, the nearest well was an hour away, and she had never grown so much as a radish.
Forty years later people come from three valleys to taste her pears.
If you follow the lanterns, you will find bread, cheese and a warm stove at the end of the path.`,
  de: `Vielen Dank, dass Sie an einem so nassen Abend gekommen sind.
Bevor wir anfangen, möchte ich Ihnen erzählen, wie dieser Obstgarten entstanden ist.
Meine Großmutter hat den ersten Baum im Frühjahr nach dem Hochwasser gepflanzt, und das ganze Dorf hat gelacht.
Der Boden war voller Steine, der nächste Brunnen lag eine Stunde entfernt, und sie hatte noch nie etwas angebaut.
Vierzig Jahre später kommen die Leute aus drei Tälern, um ihre Birnen zu probieren.
Wenn Sie den Laternen folgen, finden Sie am Ende des Weges Brot, Käse und einen warmen Ofen.`,
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
