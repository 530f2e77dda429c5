from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.config import as_toml
from simulmt.errors import ConfigError
from simulmt.recipe.plan import Recipe, Workspace


def recipe(stages: dict[str, Any], **settings: dict[str, Any]) -> Recipe:
    return Recipe.build({"title": "test", "stages": stages, "settings": settings}, "recipe.toml")


def test_a_stage_expands_to_all_combinations_and_refers_to_matching_variants() -> None:
    made = recipe(
        {
            "ctc": {"run": "train --k={k} --run={out}", "each": {"k": [1, 3]}},
            "bundle": {"run": "export {{system}} --output={out}", "each": {"system": ["ctc"], "k": [3, 1]}},
        }
    )
    assert {name: stage.words for name, stage in made.stages.items()} == {
        "ctc-k1": ("train", "--k=1", "--run={out}"),
        "ctc-k3": ("train", "--k=3", "--run={out}"),
        "bundle-ctc-k3": ("export", "{ctc-k3}", "--output={out}"),
        "bundle-ctc-k1": ("export", "{ctc-k1}", "--output={out}"),
    }


def test_a_word_is_repeated_for_each_open_value() -> None:
    made = recipe(
        {
            "bundle": {"run": "export", "each": {"system": ["a", "b"], "k": [1, 3]}},
            "scores": {"run": "evaluate --model={system}-{k}={bundle}/x --k={k}", "each": {"k": [3]}},
        }
    )
    assert made.stages["scores-k3"].words == (
        "evaluate",
        "--model=a-3={bundle-a-k3}/x",
        "--model=b-3={bundle-b-k3}/x",
        "--k=3",
    )


def test_a_single_variant_can_be_referred_to() -> None:
    made = recipe({"ctc": {"run": "train", "each": {"k": [1, 3]}}, "look": {"run": "analyse {ctc-k3}"}})
    assert made.stages["look"].needs == ("ctc-k3",)


def test_paths_enter_only_at_the_end(tmp_path: Path) -> None:
    words = "train {settings.student} --text={given}/train.en --init={ctc}/final --run={out}"
    made = recipe({"ctc": {"run": "train"}, "asn": {"run": words}}, student={"seed": 1})
    stage = made.stages["asn"]
    assert str(tmp_path) not in " ".join(stage.words)
    assert (stage.needs, stage.settings, stage.given) == (("ctc",), ("student",), ("train.en",))
    assert Workspace(tmp_path / "w", tmp_path / "d").command_line(stage) == [
        "train",
        f"{tmp_path}/w/asn/settings.student.toml",
        f"--text={tmp_path}/d/train.en",
        f"--init={tmp_path}/w/ctc/final",
        f"--run={tmp_path}/w/asn",
    ]


@given(st.permutations(range(6)), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
@settings(deadline=None, max_examples=60)
def test_every_stage_comes_after_what_it_needs(order: list[int], pairs: set[tuple[int, int]]) -> None:
    links = {(max(pair), min(pair)) for pair in pairs if pair[0] != pair[1]}
    needs = {number: [f"{{s{low}}}" for high, low in links if high == number] for number in order}
    made = recipe({f"s{number}": {"run": " ".join(["x", *needs[number]])} for number in order})
    position = list(made.stages).index
    assert all(position(need) < position(stage.name) for stage in made.stages.values() for need in stage.needs)
    if not links:
        assert list(made.stages) == [f"s{number}" for number in order]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            {"a": {"run": "x {teecher}"}, "teacher": {"run": "x"}},
            "stages.a: unknown stage '{teecher}'; did you mean teacher",
        ),
        ({"a": {"run": "x {b}"}, "b": {"run": "x {a}"}}, "circular dependency"),
        ({"a": {"run": "x {k}"}}, "stages.a: unknown stage '{k}'"),
        (
            {"a": {"run": "x", "each": {"k": [1]}}, "b": {"run": "x {a}", "each": {"k": [2]}}},
            "{a} has no variant with k = 2",
        ),
        ({"a": {"run": "x", "each": {"k": [1]}}, "a-k1": {"run": "x"}}, "stages.a-k1: duplicate stage name"),
        ({"a b": {"run": "x"}}, "invalid stage name 'a b'"),
        ({"out": {"run": "x"}}, "invalid stage name 'out'"),
        ({"a": {"run": ""}}, "stages.a: run is empty"),
        ({"a": {"run": "x {given}"}}, "stages.a: {given}: expected {given}/FILE"),
        ({"a": {"run": "x", "each": {"b": [1]}}, "b": {"run": "x"}}, "'b' names both a value and a directory"),
        ({"a": {"run": "x", "each": {"k": []}}, "b": {"run": "x {a}"}}, "each.k"),
        ({"a": {"run": "x 'y"}}, "stages.a: run: No closing quotation"),
        ({"a": {"run": "x", "every": {}}}, "unknown key 'every'"),
        ({"a": {"run": "x {settings.student}"}}, "missing settings.student"),
    ],
)
def test_errors_in_a_recipe_are_named(stages: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"recipe\.toml: ") as caught:
        recipe(stages)
    assert message in str(caught.value)


def test_unused_settings_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"settings\.studnet is not used by any stage; did you mean student"):
        recipe({"a": {"run": "x {settings.student}"}}, student={}, studnet={})


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("rate = nan", "settings.s.rate: expected"),
        ("rates = [1.0, nan]", "settings.s.rates: expected"),
        ("begun = 2024-01-01", "settings.s.begun: expected"),
        ("[settings.s.model]\nlayers = [{width = 1}]", "settings.s.model.layers: expected"),
        ("'two words' = 1", "invalid key 'two words'"),
        ("[settings.s.'']", "invalid key ''"),
    ],
)
def test_settings_that_cannot_be_written_are_an_error_at_once(line: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'title = "t"\n[stages.a]\nrun = "x {{settings.s}}"\n[settings.s]\n{line}\n')
    with pytest.raises(ConfigError, match=r"recipe\.toml: ") as caught:
        Recipe.read(path)
    assert named in str(caught.value)


def test_assignments_change_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('title = "t"\n[settings.s]\nseed = 1\n[stages.a]\nrun = "x {settings.s}"\neach.k = [1]\n')
    made = Recipe.read(path, ["settings.s.seed=2", "stages.a.each.k=[5,7]"])
    assert (list(made.stages), made.settings) == (["a-k5", "a-k7"], {"s": {"seed": 2}})


@pytest.mark.parametrize(
    ("name", "named"), [("vocabluary", "did you mean vocabulary?"), ("x", "known: source, vocabulary")]
)
def test_an_unknown_value_is_an_error(name: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'title = "t"\n[values]\nsource = "a"\nvocabulary = 1\n[stages.a]\nrun = "x {source} {vocabulary}"\n'
    )
    assert Recipe.read(path, ["values.vocabulary=5"]).stages["a"].words == ("x", "a", "5")
    with pytest.raises(
        ConfigError, match=rf"--set values\.{name}: .*recipe\.toml has no such value; {re.escape(named)}"
    ):
        Recipe.read(path, [f"values.{name}=5"])
    with pytest.raises(ConfigError, match=r"recipe\.toml: values: expected a table"):
        Recipe.read(path, ["values=5"])


def test_a_recipe_can_extend_another(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "base.toml").write_text(
        'title = "base"\n[values]\nlanguage = "en"\n[settings.s.model]\nwidth = 1\nlayers = 2\n'
        '[stages.a]\nrun = "x {settings.s} {given}/train.{language}"\n[stages.b]\nrun = "y {a}"\n'
    )
    path = tmp_path / "below" / "other.toml"
    path.write_text(
        'extends = "../base.toml"\ntitle = "other"\nvalues.language = "de"\nsettings.s.model.width = 3\n'
        '[stages.b]\nrun = "z {a}"\n'
    )
    made = Recipe.read(path)
    assert (made.title, made.settings) == ("other", {"s": {"model": {"width": 3, "layers": 2}}})
    assert [stage.words for stage in made.stages.values()] == [
        ("x", "{settings.s}", "{given}/train.de"),
        ("z", "{a}"),
    ]
    path.write_text('extends = "other.toml"\n')
    with pytest.raises(ConfigError, match="inherits from itself"):
        Recipe.read(path)


def test_stages_are_chosen_by_name_or_family() -> None:
    made = recipe({"a": {"run": "x", "each": {"k": [1, 3]}}, "b": {"run": "x"}})
    assert [stage.name for stage in made.matching(["b", "a-k3"])] == ["a-k3", "b"]
    assert [stage.name for stage in made.matching(["a"])] == ["a-k1", "a-k3"]
    assert len(made.matching([])) == 3
    with pytest.raises(ConfigError, match="--only a-k5: unknown stage; did you mean"):
        made.matching(["a-k5"])


KEYS = st.from_regex(r"[a-z_-]{1,8}", fullmatch=True)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.booleans() | st.integers(-(2**60), 2**60) | FLOATS | st.text(st.characters(exclude_categories=["Cs"]))
TABLES = st.recursive(  # of few leaves, which is quick
    st.dictionaries(KEYS, SCALARS | st.lists(st.integers())),
    lambda inner: st.dictionaries(KEYS, SCALARS | inner, max_size=3),
    max_leaves=6,
)


@given(TABLES)
@settings(deadline=None, max_examples=50)
def test_tables_survive_being_written_as_toml(table: dict[str, Any]) -> None:
    assert tomllib.loads(as_toml(table)) == table
