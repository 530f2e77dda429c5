"""Fixtures shared by all tests: small vocabularies and a small model, built in every run."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported, here or in a process that a test starts

import pytest
from hypothesis import settings

from simulmt.text import Tokenizer, VocabularySpec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that train first: they are the longest, and one left for the end would run alone."""
    items.sort(key=lambda item: item.get_closest_marker("learning") is None)


if TYPE_CHECKING:
    from simulmt.runtime.stream import Translator

# New examples are for those who change the code; a check of a given commit must give the same answer every time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

ENGLISH = """
The old bridge over the river was closed in winter.
My neighbour grows tomatoes behind the old barn.
We waited at the station until the last train came.
She asked the driver whether the bridge was closed.
The children were singing while the bread was baking.
Nobody knows why the clock in the kitchen runs backwards.
In the evening the fisherman mended his nets by the river.
The quick waiter juggled five boxes of frozen pizza.
Have you ever seen the harbour before sunrise?
Please close the window, the wind is getting colder!
He reads the newspaper every evening at the station.
The last bus to the harbour leaves at 10:45.
Her brother bought 3 tickets and 26 postcards.
We are singing in the kitchen, and nobody is listening.
The driver was waiting behind the barn in the cold wind.
What's the matter with the "frozen" river (the wide one)?
Quite a few children knew the answer; most were silent.
The wide river freezes every winter, from 7 to 8 weeks.
The sign on the door says 小心 and nothing else.
On the map the river is called 长江 or 大河.
""".strip().splitlines()

GERMAN = """
Die alte Brücke über den Fluss war im Winter gesperrt.
Mein Nachbar züchtet Tomaten hinter der alten Scheune.
Wir warteten am Bahnhof, bis der letzte Zug kam.
Sie fragte den Fahrer, ob die Brücke gesperrt war.
Die Kinder sangen, während das Brot im Ofen war.
Niemand weiß, warum die Uhr in der Küche rückwärts läuft.
Am Abend flickte der Fischer seine Netze am Fluss.
Hast du den Hafen schon einmal vor Sonnenaufgang gesehen?
Bitte schließe das Fenster, der Wind wird kälter!
Er liest jeden Abend am Bahnhof die Zeitung.
Der letzte Bus zum Hafen fährt um 10:45 Uhr.
Ihr Bruder kaufte 3 Karten und 26 Postkarten.
Quer über den Hof jagte ein flinker Fuchs zwei Pferde.
Viele Kinder wussten die Antwort; die meisten schwiegen.
Der breite Fluss friert jeden Winter zu, etwa 7 bis 8 Wochen.
Jeden Winter gehen die Kinder über die alte Brücke.
Üben wir noch einmal: „Öl“ und „Äpfel“ schreibt man so.
Das Boot gehört meinem Bruder, das Netz dem Fischer.
""".strip().splitlines()

CHINESE = """
河上的老桥冬天不开放。
我的邻居在老谷仓后面种番茄。
我们在车站等到最后一班火车来。
她问司机，桥是不是不开放？
孩子们一边唱歌，一边等面包。
没有人知道厨房里的钟为什么倒着走。
晚上，渔夫在河边补网。
你见过日出以前的港口吗？
请关上窗户，风越来越冷了！
他每天晚上在车站看报纸。
最后一班车十点四十五分开往港口。
她的哥哥买了三张票和二十六张明信片。
我们在厨房里唱歌，没有人在听。
司机在老谷仓后面等我们。
孩子们知道答案；大人们不知道。
每年冬天，这条河都会结冰（大约七、八周）。
我的哥哥用 Python 写程序。
孩子们用 Lego 造了一座桥。
老师说：“请看 Boston 的地图。”
她的哥哥在 Boston 的港口等火车。
""".strip().splitlines()


@pytest.fixture(scope="session")
def source_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """English with a few Han characters, case folded."""
    path = tmp_path_factory.mktemp("source") / "source.model"
    return Tokenizer.train(ENGLISH, path, VocabularySpec(size=150, normalization="nmt_nfkc_cf"))


@pytest.fixture(scope="session")
def target_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """German, cased."""
    path = tmp_path_factory.mktemp("target") / "target.model"
    return Tokenizer.train(GERMAN, path, VocabularySpec(size=150))


@pytest.fixture(scope="session")
def ideograph_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Chinese with a few Latin words, written without spaces and left as it is."""
    path = tmp_path_factory.mktemp("ideograph") / "ideograph.model"
    return Tokenizer.train(CHINESE, path, VocabularySpec(size=170, normalization="identity", spaced=False))


@pytest.fixture(scope="session")
def model(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Translator:
    """English to German, untrained."""
    from tiny_models import trained, translator  # imports PyTorch

    network = trained("ctc", source_tokenizer, target_tokenizer)
    return translator(network, "ctc", "int8", tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="session", autouse=True)
def torch_threads() -> None:
    """Limit PyTorch to one thread if a collected test has imported it; do not import it otherwise."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """If tests of training were collected, start their fork server before a test starts one without PyTorch."""
    helpers = sys.modules.get("train.helpers")
    if helpers is not None:
        helpers.start_fork_server()
