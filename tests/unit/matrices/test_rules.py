"""User rules: parsing, precedence, and refusals with their messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.matrices import Rule, load_rules, merged_rule, parse_rule, unmatched_rules

NAME = "decoder.layers.3.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("*:optimizer=adam", Rule(pattern="*", optimizer="adam")),
        ("*.weight:optimizer=matrix", Rule(pattern="*.weight", optimizer="matrix")),
        ("a:split=none", Rule(pattern="a", split="none")),
        ("a:split=heads", Rule(pattern="a", split="heads")),
        ("a:split=default", Rule(pattern="a", split="default")),
        ("a:lr_mult=0.5", Rule(pattern="a", lr_mult=0.5)),
        ("a:wd_mult=0", Rule(pattern="a", wd_mult=0.0)),
        (
            " a[01]? : optimizer = adam , lr_mult = 2e-1 ,wd_mult=3",
            Rule(pattern="a[01]?", optimizer="adam", lr_mult=0.2, wd_mult=3.0),
        ),
        ("a:b:lr_mult=1", Rule(pattern="a:b", lr_mult=1.0)),
    ],
)
def test_a_rule_is_read(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "a rule needs a pattern and at least one of optimizer, split, lr_mult, wd_mult"),
        ("*:", "type for example --matrix-rule '*.linear_proj.weight:optimizer=adam'"),
        ("*", "a rule needs a pattern"),
        (":lr_mult=1", "a rule needs a pattern"),
        ("optimizer=adam", "a rule needs a pattern"),
        ("*:adam", "'adam' is not key=value"),
        ("*:lr_mult=1,adam", "'adam' is not key=value"),
        ("*:lr=1", "unknown key 'lr'; supported keys are optimizer, split, lr_mult, wd_mult"),
        ("*:optimizer=sgd", "optimizer is 'sgd'; supported are matrix, adam"),
        ("*:optimizer=", "optimizer is ''; supported are matrix, adam"),
        ("*:split=qkv", "split is 'qkv'; supported are default, none, parts, heads"),
        ("*:lr_mult=x", "lr_mult is 'x'; it must be a number >= 0"),
        ("*:lr_mult=-1", "lr_mult is '-1'; it must be a number >= 0"),
        ("*:lr_mult=nan", "lr_mult is 'nan'; it must be a number >= 0"),
        ("*:wd_mult=inf", "wd_mult is 'inf'; it must be a number >= 0"),
        ("*:wd_mult=", "wd_mult is ''; it must be a number >= 0"),
    ],
)
def test_a_wrong_rule_is_refused_by_flag_and_text(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_rule(text)
    assert str(error.value).startswith(f"--matrix-rule '{text}': ")
    assert sentence in str(error.value)


def _file(folder: Path, content: Any) -> str:
    path = folder / "rules.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_file_of_rules_is_read_in_order(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        [
            {"pattern": "*", "optimizer": "adam", "lr_mult": 1},
            {"pattern": "a:*", "split": "none", "wd_mult": 0.5},
        ],
    )
    assert load_rules(path) == (
        Rule(pattern="*", optimizer="adam", lr_mult=1.0),
        Rule(pattern="a:*", split="none", wd_mult=0.5),
    )


def test_an_empty_list_is_no_rule(tmp_path: Path) -> None:
    assert load_rules(_file(tmp_path, [])) == ()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "Expecting value: line 1 column 1"),
        ('[{"pattern": "*",}]', "line 1 column"),
        ({"pattern": "*", "lr_mult": 1}, "must be a list like [{"),
        (["*:lr_mult=1"], "must be a list like [{"),
        (5, "must be a list like [{"),
        ([{"lr_mult": 1}], "(rule 0): a rule needs a pattern"),
        ([{"pattern": "*"}], "(rule 0): a rule needs a pattern and at least one of"),
        ([{"pattern": "*", "lr_mult": 1}, {"pattern": "*", "lr": 1}], "(rule 1): unknown key 'lr'"),
        ([{"pattern": "*", "optimizer": "muon"}], "(rule 0): optimizer is 'muon'; supported are"),
        ([{"pattern": "*", "optimizer": None}], "(rule 0): optimizer is 'None'; supported are"),
        ([{"pattern": "*", "split": ["none"]}], "(rule 0): split is '['none']'; supported are"),
        ([{"pattern": "*", "wd_mult": None}], "(rule 0): wd_mult is 'None'; it must be a number"),
        ([{"pattern": "*", "lr_mult": True}], "(rule 0): lr_mult is 'True'; it must be a number"),
        ([{"pattern": "*", "wd_mult": [1]}], "(rule 0): wd_mult is '[1]'; it must be a number"),
    ],
    ids=str,
)
def test_a_wrong_file_is_refused_by_flag_and_path(
    tmp_path: Path, content: Any, sentence: str
) -> None:
    path = _file(tmp_path, content)
    with pytest.raises(ValueError) as error:
        load_rules(path)
    assert str(error.value).startswith(f"--matrix-rules {path}")
    assert sentence in str(error.value)


def test_a_file_that_cannot_be_read_is_refused_by_flag_and_path(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(ValueError) as error:
            load_rules(str(path))
        assert str(error.value).startswith(f"--matrix-rules {path}: [Errno ")


def test_a_file_that_is_no_text_is_refused_by_flag_and_path(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_bytes(b"\xff\xfe[]")
    with pytest.raises(ValueError) as error:
        load_rules(str(path))
    assert str(error.value).startswith(f"--matrix-rules {path}: ")


def test_without_a_rule_everything_is_left_to_the_default() -> None:
    assert merged_rule([Rule(pattern="other", lr_mult=2.0)], NAME) == Rule(pattern=NAME)


def test_the_later_rule_wins_field_by_field() -> None:
    rules = [
        Rule(pattern="*", optimizer="adam", lr_mult=1.0, wd_mult=1.0),
        Rule(pattern="*.linear_fc?.weight", optimizer="matrix", lr_mult=0.5),
        Rule(pattern="*.linear_fc2.weight", lr_mult=9.0, split="default"),
        Rule(pattern="*.[0-4].*", lr_mult=0.0, split="none"),
    ]
    assert merged_rule(rules, NAME) == Rule(
        pattern=NAME, optimizer="matrix", split="none", lr_mult=0.0, wd_mult=1.0
    )
    assert merged_rule(rules[::-1], NAME) == Rule(
        pattern=NAME, optimizer="adam", split="none", lr_mult=1.0, wd_mult=1.0
    )


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (NAME, True),
        ("*linear_fc1*", True),
        ("linear_fc1", False),
        ("decoder.layers.[12].*", False),
        ("DECODER.*", False),
        ("decoder.layers.?.mlp.*", True),
    ],
)
def test_a_pattern_is_a_glob_on_the_whole_name(pattern: str, matches: bool) -> None:
    rule = Rule(pattern=pattern, lr_mult=3.0)
    assert merged_rule([rule], NAME).lr_mult == (3.0 if matches else None)
    assert unmatched_rules([rule], [NAME]) == (() if matches else (pattern,))


def test_rules_that_match_nothing_are_found_in_order() -> None:
    rules = [Rule(pattern=pattern, lr_mult=1.0) for pattern in ("b", "a*", "c", "?")]
    assert unmatched_rules(rules, iter(["a.x", "a.y"])) == ("b", "c", "?")
    assert unmatched_rules(rules, []) == ("b", "a*", "c", "?")
    assert unmatched_rules([], []) == ()
