"""The README and the pages of docs/ are true where a program can tell: code, commands, quotations, links and tables."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import itertools
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import specdec_kernels as sd
from specdec_kernels import engine, hf
from specdec_kernels.cli import make_parser
from specdec_kernels.compat.sglang import functions as sglang
from specdec_kernels.models.families import base as families
from specdec_kernels.ops._op_list import native_halves, public_ops
from support.cli_reference import reference_page

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("examples/*/*.md"))]

# The ops, what they take and return, and what stands beside them.
PUBLIC = {name for name in sd.__all__ if inspect.isclass(getattr(sd, name)) or inspect.isfunction(getattr(sd, name))}

every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def python_blocks(page: Path) -> list[str]:
    return blocks(page, "python")


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return what `#...` may name: each heading in lower case, without punctuation, with dashes for spaces."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def printed_by(block: str) -> list[str]:
    """Return the lines that a block says it prints: the comments after its `print` calls."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)


@every_page
def test_code_runs_and_prints_what_it_says(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page share one namespace, in order; families that one registers go with it."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    namespace: dict[str, object] = {}
    for number, block in enumerate(python_blocks(page), 1):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, f"{page.name}, Python block {number}", "exec"), namespace)
        if printed_by(block):
            assert out.getvalue().splitlines() == printed_by(block)


def commands(page: Path) -> list[list[str]]:
    """Return the words of every command of the page's shell blocks; a quotation or a backslash goes over lines."""
    shell = [*blocks(page, "bash"), *(block for block in blocks(page, "text") if not PYTHON_CALL.match(block))]
    found, line = [], ""
    for part in "".join(shell).replace("\\\n", " ").splitlines():
        line += part + "\n"
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # within a quotation
            continue
        line = ""
        found += [list(run) for is_end, run in itertools.groupby(words, ("&&", "|", ";").__contains__) if not is_end]
    assert not line, f"{page.name} has a quotation without an end: {line}"
    return found


PYTHON_CALL = re.compile(r"[\w.]+\(")
# Programs of others, whose flags are not checked here.
OTHERS = ("vllm", "python", "curl", "lm_eval", "serve", "torchrun", "vllm-router", "specforge", ".")


@every_page
def test_commands_are_understood(page: Path) -> None:
    """`specdec` ends the process where it does not know a command or an option; extras and files of the rest exist."""
    extras = set(re.findall(r"^(\w+) = \[", PYPROJECT.split("[project.optional-dependencies]")[1], re.MULTILINE))
    for program, *arguments in commands(page):
        if program == "specdec":
            make_parser().parse_args(arguments)
        elif program == "pip":
            asked = [word for word in arguments[1:] if not word.startswith("-")]
            assert arguments[0] == "install" and not [word for word in asked if word.startswith("specdec-kernels")]
            named = {
                extra for word in asked for group in re.findall(r"^\.\[(.*)\]$", word) for extra in group.split(",")
            }
            assert named <= extras, f"{page.name} names {named - extras}"
        elif program == "./build.sh":
            assert arguments[0] in verbs()
        else:
            assert program in OTHERS, f"{page.name} calls {program}"


@every_page
def test_calls_in_text_blocks_are_python(page: Path) -> None:
    for block in blocks(page, "text"):
        if PYTHON_CALL.match(block):
            compile(block, f"{page.name}, text block", "exec")


@every_page
def test_cpp_is_quoted_from_the_source(page: Path) -> None:
    source = {line.strip() for path in (ROOT / "csrc").rglob("*.cpp") for line in path.read_text().splitlines()}
    for block in blocks(page, "cpp"):
        assert set(block.splitlines()) <= source


def test_readme_shows_the_engine_and_the_ops() -> None:
    engine, ops = python_blocks(README)
    assert "import specdec_kernels as sd" in ops and "from specdec_kernels.engine import" in engine


@every_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_site_says_where_blocks_need_those_before_them_and_drops_links_out_of_docs() -> None:
    spec = importlib.util.spec_from_file_location("site_links", ROOT / "docs" / "site_links.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="ops/kv.md"))
    config = SimpleNamespace(docs_dir=str(ROOT / "docs"))

    def on_site(text: str) -> str:
        done: str = hook.on_page_markdown(text, page=page, config=config)
        return done

    block = "```python\nx = 1\n```\n"
    assert on_site(f"a\n\n{block}{block}") == f"a\n\n{hook.ONE_PROGRAM}{block}{block}"
    assert on_site(f"a\n\n{block}") == f"a\n\n{block}"
    assert (
        on_site("[a](../round.md#x) [b](../../README.md) [c](https://d.e)") == "[a](../round.md#x) b [c](https://d.e)"
    )


def verbs() -> list[str]:
    usage = subprocess.run([ROOT / "build.sh"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^  ([a-z-]+)(?: |$)", usage, re.MULTILINE)


def test_verbs_named_are_verbs_of_build_sh() -> None:
    assert verbs() == ["demo", "test", "compile-check", "docs", "dev", "wheel"]
    for page in PAGES:
        named = set(re.findall(r"\./build\.sh ([a-z-]+)", page.read_text()))
        assert named <= set(verbs()), f"{page.name} names {named - set(verbs())}"


def test_unknown_verb_is_refused() -> None:
    done = subprocess.run([ROOT / "build.sh", "frobnicate"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: ./build.sh <verb>\n")


def test_op_table_names_every_compiled_op() -> None:
    """`make_page_pool` and its like are helpers in Python."""
    index = (ROOT / "docs" / "ops" / "index.md").read_text()
    rows = [line.split("|") for line in index.splitlines() if re.match(r"\| \[\w+\]\(\w+\.md\) \|", line)]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row[2])]
    assert sorted(named) == sorted([*(op for op in public_ops() if native_halves(op)), "NgramIndex"])


def test_pages_count_the_model_types_that_work() -> None:
    """The list is written by a run over all of them; other pages repeat its count."""
    works = sum("| yes |" in line for line in (ROOT / "docs/models.md").read_text().splitlines())
    counts = re.findall(
        r"(\d+) (?:Hugging Face )?(?:model )?types (?:work|\()|(\d+) (?:Hugging Face )?model types",
        "\n".join(map(Path.read_text, PAGES)),
    )
    assert {int(one or other) for one, other in counts} == {works} and len(counts) > 2


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120


def test_site_has_every_page_once() -> None:
    """`./build.sh docs` writes the page of benchmarks."""
    nav = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(nav) == sorted(pages | {"benchmarks.md"})


def test_site_has_every_public_name_once() -> None:
    """What `import specdec_kernels` gives, each with its docstring on the page of its room."""
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs" / "ops").glob("*.md")))
    shown = re.findall(r"^::: specdec_kernels\.[\w.]*?(\w+)$", pages, re.MULTILINE)
    assert sorted(shown) == sorted(PUBLIC)


def shown_in_reference() -> list[str]:
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
    return re.findall(r"^::: specdec_kernels\.(\S+)$", pages, re.MULTILINE)


def test_reference_has_every_public_name_once() -> None:
    """The exports of `engine` and `hf`, every function that other engines call, and what the plugins register."""
    plugin = [
        "compat.sglang.attention.TreeAttention",
        "compat.sglang.attention.TreeAttentionSteps",
        "compat.sglang.ngram.NgramTrees",
        "compat.sglang.plugin.register",
        "compat.tensorrt_llm.drafter.NgramDrafter",
        "compat.tensorrt_llm.ngram.NgramDrafts",
        "compat.vllm.NgramProposer",
        "compat.vllm.attention.PagedAttention",
        "compat.vllm.attention.RowsBuilder",
        "compat.vllm.plugin.register",
    ]
    compat = [
        f"compat.sglang.{name}"
        for name, value in vars(sglang).items()
        if getattr(value, "__module__", None) == sglang.__name__ and value.__name__ == name and name[0] != "_"
    ]
    names = [*(f"engine.{name}" for name in engine.__all__), *(f"hf.{name}" for name in hf.__all__)]
    assert sorted(shown_in_reference()) == sorted([*names, *compat, *plugin, "torch_ops"])


def test_reference_of_the_command_line_is_what_help_says() -> None:
    """Written by tests/support/cli_reference.py."""
    assert (ROOT / "docs" / "reference" / "cli.md").read_text() == reference_page()


def test_changelog_has_this_version_first() -> None:
    """Return the newest release in the changelog, after an unreleased part, if any."""
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[versions[0] == "Unreleased"] == (ROOT / "VERSION").read_text().strip()


def test_ops_are_called_in_the_examples_of_their_pages() -> None:
    for page in sorted((ROOT / "docs" / "ops").glob("*.md")):
        for op in re.findall(r"^::: specdec_kernels\.ops\.([a-z]\w+)$", page.read_text(), re.MULTILINE):
            assert any(f"sd.{op}(" in block for block in python_blocks(page)), f"{page.name} does not call {op}"


def test_design_page_names_every_room_of_csrc() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    rooms = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert set(re.findall(r"^  ([a-z]+)/ ", page, re.MULTILINE)) >= rooms
