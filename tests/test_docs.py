# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The guide runs as it stands, links lead somewhere, and the reference builds without a warning."""

import dataclasses
import re
import shlex
import warnings
from pathlib import Path

import pytest

import deepspeed_hybrid
import deepspeed_hybrid.docs
from deepspeed_hybrid.cli import build_parser
from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.batch import SamplingConfig
from deepspeed_hybrid.paths import OPS
from deepspeed_hybrid.tools import reference
from deepspeed_hybrid.tools.reference import MODULES, broken_links, build, slug, unlinked_names

ROOT = Path(__file__).resolve().parents[1]
GUIDE = sorted((ROOT / "deepspeed_hybrid" / "docs").glob("*.md"))
FIRST = ROOT / "deepspeed_hybrid" / "docs" / "from_vllm.md"
PAGES = [*GUIDE, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "experiments").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(path.read_text()) if kind == language]


def prose(path: Path) -> str:
    """What is outside of code blocks."""
    return FENCE.sub("", path.read_text())


# ------------------------------------------------------------------------------------------------------------ guide


@pytest.mark.parametrize("path", GUIDE, ids=name_of)
def test_python_of_a_page_runs(path, one_process, tmp_path, monkeypatch):
    """All of a page in one go, behind the block that makes what all of them start from."""
    monkeypatch.chdir(tmp_path)
    start, *_ = blocks(FIRST, "python")
    code = blocks(path, "python")[path == FIRST :]
    assert code
    page: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the imports and defaults of other packages
        exec(compile(start, FIRST.name, "exec"), page)
    exec(compile("\n".join(code), path.name, "exec"), page)
    CHECKS.get(path.name, lambda page, folder: None)(page, tmp_path)


def from_vllm(page: dict, folder: Path) -> None:
    assert page["report"].bytes_copied == 0 and page["batch"].input_ids.shape[0] == 8
    answered = page["answered"]
    assert (page["ratio"][answered] - 1).abs().max() < 1e-3  # what samples is what trains


def options(page: dict, folder: Path) -> None:
    assert (folder / "trace.json").exists() and page["stats"]["slots"] == 6 and page["stats"]["refills"] > 0


def speculation(page: dict, folder: Path) -> None:
    assert page["figures"]["tokens_per_step"] >= 1


CHECKS = {"from_vllm.md": from_vllm, "options.md": options, "speculation.md": speculation}


@pytest.mark.parametrize("path", [*GUIDE, ROOT / "README.md"], ids=name_of)
def test_commands_of_a_page_are_commands(path):
    """Each line that starts ours, also under a launcher, parses."""
    for line in "".join(blocks(path, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        ours = "deepspeed-hybrid" if "deepspeed-hybrid" in words else "deepspeed_hybrid"
        if ours in words and "pip" not in words:
            build_parser().parse_args(words[words.index(ours) + 1 :])


@pytest.mark.parametrize("path", GUIDE, ids=name_of)
def test_options_of_a_page_are_options(path):
    """`name=` in a text is a field of ours; the first cells of tables are others' words, or more than one name."""
    text = re.sub(r"^\|[^|]*\|", "", prose(path), flags=re.MULTILINE)
    known = {field.name for kind in (HybridEngineRolloutConfig, SamplingConfig) for field in dataclasses.fields(kind)}
    for name in re.findall(r"[`(]([a-z_]+)=", text):
        assert name in known, f"{name} is no option"


def test_guide_names_every_op_that_may_fall_back():
    text = (ROOT / "deepspeed_hybrid" / "docs" / "fallbacks.md").read_text()
    assert all(f"{name} op" in text for name in OPS)


def test_guide_has_every_page():
    included = re.findall(r"^\.\. include:: (\S+)$", deepspeed_hybrid.docs.__doc__ or "", re.MULTILINE)
    assert sorted(included) == [path.name for path in GUIDE]


# ------------------------------------------------------------------------------------------------------------ links


def anchors(path: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    for link in LINK.findall(prose(path)):
        if link.startswith(("http://", "https://")):
            continue
        address, _, anchor = link.partition("#")
        target = path if not address else path.parent / address
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


# -------------------------------------------------------------------------------------------------------- reference


def test_reference_builds(tmp_path, monkeypatch):
    """A warning of pdoc, as of an import that fails, is an error here. The folder is named as a person would."""
    pytest.importorskip("pdoc", reason="needs pdoc, which the test extra brings")
    monkeypatch.chdir(tmp_path.parent)
    assert build(Path(tmp_path.name)) == []
    api = (tmp_path / "deepspeed_hybrid.html").read_text()
    assert all(f'id="{name}"' in api for name in deepspeed_hybrid.__all__)
    assert 'id="HybridEngineRollout.export_chrome_trace"' in api
    guide = tmp_path.joinpath(*reference.GUIDE.split(".")).with_suffix(".html").read_text()
    titles = [re.search(r"^# (.+)$", path.read_text(), re.MULTILINE).group(1) for path in GUIDE]
    assert all(f'id="{slug(title)}"' in guide for title in titles)
    assert len(list(tmp_path.rglob("*.html"))) == len(MODULES) + 1  # and the index


def test_wrong_links_of_a_reference_are_found(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "a.html").write_text(
        '<h1 id="here"></h1><a href="#here">1</a><a href="#gone">2</a><a href="below/b.html#there">3</a>'
        '<a href="below/c.html">4</a><a href="https://example.org/x">5</a>'
        "<code>RolloutBatch</code><a href='#here'><code>RolloutRequest</code></a>"
    )
    (tmp_path / "below" / "b.html").write_text('<p id="there"><a href="../a.html#nowhere">6</a></p>')
    broken = broken_links(tmp_path)
    assert len(broken) == 3
    assert all(any(part in line for line in broken) for part in ("#gone", "below/c.html", "../a.html#nowhere"))
    assert unlinked_names(tmp_path) == ["a.html names RolloutBatch without a link"]
