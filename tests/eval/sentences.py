"""A test set in three languages, with lines that are easy to miscount."""

from __future__ import annotations

ENGLISH = [
    "The old bridge over the river was closed in winter.",
    "Wait. Is the harbour closed? Nobody knows.",  # three sentences on one line
    "The sign says 小心 and the map says 大河.",  # words that the runtime counts one by one
    "Close it",
    "My neighbour grows tomatoes behind the old barn, and we waited at the station until the last train came.",
]
GERMAN = [
    "Die alte Brücke über den Fluss war im Winter gesperrt.",
    "Warte. Ist der Hafen gesperrt? Niemand weiß es.",
    "Auf dem Schild steht 小心 und auf der Karte 大河.",
    "Schließe es",
    "Mein Nachbar züchtet Tomaten hinter der alten Scheune, und wir warteten am Bahnhof, bis der letzte Zug kam.",
]
CHINESE = [
    "河上的老桥冬天不开放。",
    "等等。港口不开放吗？没有人知道。",
    "牌子上写着小心，地图上写着 New York 大河。",
    "关上",
    "我的邻居在老谷仓后面种番茄，我们在车站等到最后一班火车来。",
]
