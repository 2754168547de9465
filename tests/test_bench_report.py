"""scripts/benchmarks/report.py: real runs, each in a process of its own, and the page."""

import json
from html.parser import HTMLParser

import pytest
from benchmark_scripts import report
from click.testing import CliRunner


def invoke(*arguments):
    return CliRunner().invoke(report.main, [str(word) for word in arguments])


@pytest.fixture
def short_runs(monkeypatch):
    """The shipped model with few tokens, and one that is not there."""
    subjects = {
        "storyteller": ("models.py", "--prompt", "4", "--new", "2", "--threads", "1", "--backend", "numpy"),
        "absent": ("models.py", "/no/such/model"),
    }
    monkeypatch.setattr(report, "SUBJECTS", subjects)


@pytest.mark.thorough
@pytest.mark.usefixtures("short_runs")
def test_a_report(tmp_path):
    result = invoke("--out", tmp_path / "r", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["equal"]
    assert facts == json.loads((tmp_path / "r" / "report.json").read_text())
    right, wrong = facts["runs"]
    assert right["facts"]["decode_tokens_per_s"] > 0
    assert wrong["facts"] is None
    assert "/no/such/model" in wrong["why"]
    page = (tmp_path / "r" / "report.html").read_text()
    HTMLParser().feed(page)
    assert report.in_words(right["facts"]["decode_tokens_per_s"]) in page
    assert "not measured: " in page
    again = report.BenchReport.of(facts)
    assert report.write_page(again) == page


def test_words_that_no_title_has(tmp_path):
    result = invoke("--out", tmp_path, "--only", "llama 405b")
    assert result.exit_code == 2
    assert "2B-4T" in result.output


def test_a_bar_is_a_share_of_the_bound():
    def facts(**changes):
        speeds = {"decode_tokens_per_s": 30.0, "bound_tokens_per_s": 40.0, "fits_in_cache": False}
        prompt = {"prompt_tokens_per_s": 300.0, "prompt_bound_tokens_per_s": None}
        peers = {
            "slow": {"version": "1.2", "decode_tokens_per_s": 4.0, "prompt_tokens_per_s": 9.0},
            "absent": "pip install",
        }
        return {**speeds, **prompt, "versus": peers, **changes}

    runs = [
        report.BenchRun(name, (), 1.0, facts(**changes))
        for name, changes in (("a", {}), ("b", {"fits_in_cache": True}))
    ]
    whole = report.BenchReport("0", "2026-01-01", "A", "B", 2, [*runs, report.BenchRun("c", (), 1.0, why="no memory")])
    (name, bars), (_, unbounded) = report.bars_of(whole, "decode")
    assert (name, bars) == ("a", [("bitnet_ref", 30.0, 0.75), ("slow 1.2", 4.0, 0.1)])
    assert [bar.share for bar in unbounded] == [None, None]
    assert [bar.share for _, bars in report.bars_of(whole, "prompt") for bar in bars] == [None] * 4
