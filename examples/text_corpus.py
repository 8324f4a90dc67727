"""Builds a few megabytes of real text in Megatron's indexed-dataset format, without downloads.

The text is present on every machine that can run the demo: the Python manual of `help()`, the
sources of the standard library, the docstrings of torch, and the descriptions of installed
packages. Tokens are bytes, 256 ends a document.

    python examples/text_corpus.py --out demo_output/corpus --megabytes 4
"""

import argparse
import ast
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
PREFIX_NAME = "stdlib_text_document"
HELD_OUT_PERCENT = 5

# Incremented when the selection or order of documents changes, so that a cached corpus is rebuilt.
RECIPE = 1
# No single file should be a large part of the text, least of all of the held-out part.
MAX_DOCUMENT_BYTES = 48 * 1024
MIN_DOCUMENT_BYTES = 512
# Tables and generated code are not useful text.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "site-packages", "encodings", "lib2to3", "pydoc_data", "testing", "_vendor"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """The written corpus, and its flags for Megatron."""

    prefix: str
    """Value of `--data-path`: the path of the .bin and .idx files without their suffix."""
    split: str
    """Value of `--split`: train, validation and test percentages, by document."""
    documents: int
    held_out_documents: int
    tokens: int
    """Bytes of text and one end-of-document token for each document."""


def build_corpus(out_dir: Path | str, megabytes: float = 4.0) -> CorpusInfo:
    """Write the corpus to `out_dir`, unless the same one exists."""
    out_dir = Path(out_dir).resolve()
    manifest = out_dir / "corpus.json"
    recipe = {
        "recipe": RECIPE,
        "python": platform.python_version(),
        "megabytes": megabytes,
        "out": str(out_dir),
    }
    if manifest.exists():
        stored = json.loads(manifest.read_text())
        if stored["recipe"] == recipe:
            return CorpusInfo(**stored["info"])

    chosen = select_documents(int(megabytes * 1_000_000))
    out_dir.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)
    prefix = out_dir / PREFIX_NAME
    write_indexed_dataset(prefix, chosen)
    info = CorpusInfo(
        prefix=str(prefix),
        split=f"{100 - HELD_OUT_PERCENT},{HELD_OUT_PERCENT},0",
        documents=len(chosen),
        # Rounded like Megatron's own split.
        held_out_documents=len(chosen) - round(len(chosen) * (100 - HELD_OUT_PERCENT) / 100),
        tokens=sum(len(text) + 1 for text in chosen),
    )
    # Last, so that an interrupted build is not mistaken for a complete one.
    manifest.write_text(json.dumps({"recipe": recipe, "info": dataclasses.asdict(info)}, indent=2))
    return info


def select_documents(max_bytes: int) -> list[bytes]:
    """Return documents of at most `max_bytes` in total, without duplicates, in a fixed order.

    They are ordered by a hash of their names, so that the tail, which Megatron's `--split` holds
    out, is a fair sample of all kinds of text, and a smaller corpus is a prefix of a larger one.
    """
    sources = [*manual_topics(), *package_descriptions(), *stdlib_sources(), *torch_modules()]
    sources.sort(key=lambda source: hashlib.sha256(source.name.encode()).digest())
    chosen: list[bytes] = []
    seen: set[bytes] = set()
    total = 0
    for source in sources:
        text = source.read()[:MAX_DOCUMENT_BYTES]
        digest = hashlib.sha256(text).digest()
        if len(text) < MIN_DOCUMENT_BYTES or digest in seen:
            continue
        if total + len(text) > max_bytes:
            break
        seen.add(digest)
        chosen.append(text)
        total += len(text)
    return chosen


@dataclasses.dataclass(frozen=True)
class Source:
    """A named document; its text is read only when it is selected."""

    name: str
    path: Path | None = None
    text: str = ""
    docstrings_only: bool = False

    def read(self) -> bytes:
        """Return the text as bytes."""
        if self.path is None:
            return self.text.encode()
        content = self.path.read_bytes()
        return docstrings(content) if self.docstrings_only else content


def manual_topics() -> Iterator[Source]:
    """Yield the chapters of Python's language reference printed by `help('topic')`."""
    # Absent if a distribution strips the documentation; then it is omitted.
    if importlib.util.find_spec("pydoc_data.topics") is None:
        return
    from pydoc_data.topics import topics

    for name, text in topics.items():
        yield Source(f"manual/{name}", text=text)


def package_descriptions() -> Iterator[Source]:
    """Yield the README of each installed package, from its metadata."""
    for distribution in importlib.metadata.distributions():
        # Headers, an empty line, then the README.
        description = (distribution.read_text("METADATA") or "").partition("\n\n")[2]
        yield Source(f"package/{distribution.metadata['Name']}", text=description)


def stdlib_sources() -> Iterator[Source]:
    """Yield the modules of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path, name in python_files(root):
        yield Source(f"stdlib/{name}", path=path)


def torch_modules() -> Iterator[Source]:
    """Yield the docstrings of torch, one document per module."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    root = Path(spec.submodule_search_locations[0])
    for path, name in python_files(root):
        yield Source(f"torch/{name}", path=path, docstrings_only=True)


def python_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield Python files below `root` with their relative names."""
    for folder, subfolders, files in root.walk():
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for file in files:
            if file.endswith(".py"):
                path = folder / file
                yield path, path.relative_to(root).as_posix()


def docstrings(source: bytes) -> bytes:
    """Return all docstrings of a module, each under the name of its object."""
    parts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = "" if isinstance(node, ast.Module) else f"{node.name}\n\n"
                parts.append(f"{name}{text}\n")
    return "\n\n".join(parts).encode(errors="replace")


def write_indexed_dataset(prefix: Path, texts: list[bytes]) -> None:
    """Write `<prefix>.bin` and `<prefix>.idx`, one document and one sequence per text."""
    # Imported here: megatron takes seconds to import, and a cached corpus does not need it.
    with warnings.catch_warnings():
        # It warns about missing GPU packages, which a file writer does not need.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in texts:
        tokens = np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), END_OF_DOCUMENT)
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--megabytes", type=float, default=4.0, help="size cap (default: 4)")
    arguments = parser.parse_args()
    info = build_corpus(arguments.out, arguments.megabytes)
    print(json.dumps(dataclasses.asdict(info), indent=2))


if __name__ == "__main__":
    main()
