"""How pages and docstrings are written, as far as a machine can measure it. Whether they are clear is judged by eyes.

Pages: sentences have a bound, in words; code and output fit a page's width. Pages, decisions and the product's
docstrings: no "nobody", "whoever" or "stranger" where a noun stands ready. No docstring of the product or of tools
opens with a relative clause. No name of a class, or of any other type, stands twice in the product, and no word in the
glossary. Decisions are measured no further, since they are dated. The reference is not measured, since it is made from
docstrings; nor are reports, which programs or reviews wrote.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = [
    *sorted(ROOT.glob("docs/*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "e2e/README.md")),
]
DECISIONS: Final = sorted(ROOT.glob("docs/decisions/*.md"))
PRODUCT: Final = ("protocol", "kube", "router", "connector", "operator", "cli")
MAX_WORDS: Final = 32
"""Of a sentence. Longer ones were the ones that reviewers had to read twice."""
OF_EACH_PACKAGE: Final = {"Settings", "Metrics", "ApiUrl", "DnsName"}
"""The only names of types that packages share: each has its own, of the same meaning, and imports no other's."""
MAX_ENTRY_CHARS: Final = 160
"""Of an entry of the changelog, with its link."""
MAX_CODE_CHARS: Final = 100
"""Of a line of code or quoted output: a longer one scrolls sideways where pages are read."""
OPENING: Final = re.compile(
    r"\s*(what|who|whose|which|whoever|nobody|(by|from|in|of|on|to) (which|whom)|those who)\b", re.IGNORECASE
)
"""A docstring begins with its subject, and that is no relative clause."""
BANNED: Final = re.compile(r"\b(nobody|whoever|strangers?)\b", re.IGNORECASE)


def sentences_of(page: str) -> list[str]:
    """The sentences of paragraphs, list items and table cells. Code in backticks and links count as one word."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(#+ .*)$", r"\1\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`\n]+`", "CODE", text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.)\s?)|\|", text)
    found = (re.split(r"(?<=[.!?])[)*\"']*\s+", " ".join(block.split())) for block in blocks)
    return [sentence for block in found for sentence in block if sentence]


def too_long(page: str) -> list[str]:
    return [sentence for sentence in sentences_of(page) if len(sentence.split()) > MAX_WORDS]


def too_wide(page: str) -> list[str]:
    """Lines between fences that scroll."""
    blocks = re.findall(r"^```.*?^```$", page, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if len(line) > MAX_CODE_CHARS]


def docstrings_of(source: str) -> list[str]:
    """Docstrings, and the strings below constants and fields that serve as theirs."""
    values = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    return [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def types_of(source: str) -> list[str]:
    """Names of classes, and of what is written as one at the top of a file: aliases and new types."""
    tree = ast.parse(source)
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    plain = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    targets = plain + [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return classes + [name for name in names if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name)]


def words_of(glossary: str) -> list[str]:
    """The words that it explains: the first cell of each row, without what is in parentheses."""
    cells = re.findall(r"^\| ([^|]+) \|", glossary, flags=re.MULTILINE)
    words = (word.strip() for cell in cells for word in re.split("[,;]", re.sub(r"\([^)]*\)", "", cell)))
    return [word for word in words if word != "Word"]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_no_sentence_of_a_page_is_too_long(page: Path) -> None:
    assert too_long(page.read_text()) == []


def test_an_entry_of_the_changelog_fits_one_line() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) > 100
    assert [line for line in lines if len(line) > MAX_ENTRY_CHARS] == []


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_no_code_of_a_page_scrolls(page: Path) -> None:
    assert too_wide(page.read_text()) == []


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS], ids=shown)
def test_a_page_names_who_acts(page: Path) -> None:
    text = re.sub(r"`[^`\n]+`", "CODE", page.read_text())
    assert [line for line in text.splitlines() if BANNED.search(line)] == []


@pytest.mark.parametrize("package", PRODUCT)
def test_a_docstring_names_who_acts(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {shown(file): [text for text in docstrings_of(file.read_text()) if BANNED.search(text)] for file in files}
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize("package", [*PRODUCT, "tools"])
def test_a_docstring_opens_with_its_subject(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {shown(file): [text for text in docstrings_of(file.read_text()) if OPENING.match(text)] for file in files}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_the_name_of_a_type_has_one_meaning() -> None:
    files = [file for package in PRODUCT for file in (ROOT / package).rglob("*.py")]
    count = Counter(name for file in files for name in types_of(file.read_text()) if not name.startswith("_"))
    assert len(count) > len(OF_EACH_PACKAGE)
    assert {name for name, times in count.items() if times > 1} == OF_EACH_PACKAGE


def test_a_private_name_of_a_type_has_one_meaning_in_a_package() -> None:
    for package in PRODUCT:
        files = sorted((ROOT / package).rglob("*.py"))
        # Also not beside a public one: a reader says both alike.
        count = Counter(name.lstrip("_") for file in files for name in types_of(file.read_text()))
        assert count
        assert {name for name, times in count.items() if times > 1} == set(), package


def test_a_private_name_of_a_type_is_no_public_one_of_another_package() -> None:
    names = {
        name for package in PRODUCT for file in (ROOT / package).rglob("*.py") for name in types_of(file.read_text())
    }
    private = {name.lstrip("_") for name in names if name.startswith("_")}
    assert private
    assert private & names == set()


def test_the_glossary_explains_a_word_once() -> None:
    count = Counter(words_of((ROOT / "docs" / "glossary.md").read_text()))
    assert len(count) > 100
    assert {word for word, times in count.items() if times > 1} == set()


def test_the_measures_find_what_is_planted() -> None:
    long = " ".join(["word"] * (MAX_WORDS + 1))
    assert too_long(f"Short one. {long}. Short again.") == [f"{long}."]
    assert too_long(f"- item\n- {long}\n") == [f"- {long}"]
    assert too_long(f"## A heading\n{long}") == [long]
    assert too_long(f"| cell | {long} |\n") == [long]
    assert too_long(f"```\n{long}\n```\n") == []
    assert too_long("`" + long + "` is one word.") == []
    wide = "x" * (MAX_CODE_CHARS + 1)
    assert too_wide(f"{wide}\n```\nshort\n{wide}\n```\n{wide}\n") == [wide]
    assert docstrings_of('"""Top."""\nX = 1\n"""Whoever reads it."""\n') == ["Top.", "Whoever reads it."]
    planted = (
        "class Cut:\n    class _Part: ...\n\nSpan: TypeAlias = tuple[int, int]\nTell = Callable[[], None]\nMAX_S = 1\n"
    )
    assert types_of(planted) == ["Cut", "_Part", "Tell", "Span"]
    assert all(map(BANNED.search, ("Nobody waits", "for whoever asks", "a stranger's frame", "strangers")))
    assert all(map(OPENING.match, ("What decode does.", "which of them", "\n    Who: a rank.", "By which it came.")))
    assert not any(map(OPENING.match, ("The rank that asks.", "Whatever", "A rank knows what.", "Whole.")))
    assert not BANNED.search("`NOBODY_ANSWERED` and a nobodyness")
    table = "| Word | Meaning |\n|---|---|\n| piece, gap (of a stream) | x |\n| key; piece | y |\n"
    assert words_of(table) == ["piece", "gap", "key", "piece"]


def test_a_page_has_hyphens_in_its_name() -> None:
    assert [shown(page) for page in ROOT.glob("docs/**/*.md") if "_" in page.name] == []
