"""Corpora: what counts as a document, and fingerprints that depend only on the content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolwise.errors import ConfigError, DataError
from toolwise.tools.builtin.search.index import Document
from toolwise.tools.builtin.search.tool import FileCorpus, InlineCorpus, WordNet, read_corpora

SYNSETS = """  1 This is the licence
00001740 03 n 02 dog 0 domestic_dog 0 003 ~ 00001930 n 0000 | a member of the genus Canis; "the dog barked all night"
00002312 00 a 01 galore(ip) 0 001 ;c 06037666 n 0000 | in great numbers
"""


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    for part in ("noun", "verb", "adj", "adv"):
        (tmp_path / f"data.{part}").write_text(SYNSETS)
    return tmp_path


def test_wordnet_has_a_document_for_each_meaning(wordnet: Path) -> None:
    documents = list(WordNet(wordnet).documents())
    assert len(documents) == 8
    assert documents[0] == Document(
        "dog, domestic dog (noun)", 'a member of the genus Canis; "the dog barked all night"'
    )
    assert documents[1] == Document("galore (noun)", "in great numbers")


def test_wordnet_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="apt-get install wordnet-base, or set wordnet to the folder"):
        WordNet(tmp_path).fingerprint()


def test_a_torn_wordnet_is_named(wordnet: Path) -> None:
    (wordnet / "data.verb").write_text("  licence\n00001 29 v ff sigh\n")
    with pytest.raises(DataError, match=r"data[.]verb: line 2: not a line of WordNet data"):
        list(WordNet(wordnet).documents())


@pytest.mark.skipif(not Path("/usr/share/wordnet/data.noun").is_file(), reason="needs Debian's wordnet-base")
def test_all_of_wordnet_is_read() -> None:
    assert sum(1 for _ in WordNet().documents()) == 117_659


def test_a_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    corpus = FileCorpus((path,))
    first = corpus.fingerprint()
    os.utime(path, (1, 1))
    assert corpus.fingerprint() == first
    path.write_text("two")
    assert corpus.fingerprint() != first
    assert FileCorpus((path,), text_field="body").fingerprint() != corpus.fingerprint()
    assert InlineCorpus((Document("", "a"),)).fingerprint() != InlineCorpus((Document("a", ""),)).fingerprint()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"body": "x"}', "row 0 .*field text: must be a string, got NoneType; select another with text_field"),
        (
            '{"text": "x", "title": 3}',
            "row 0 .*field title: must be a string, got int; select .* title_field",
        ),
        ("nonsense", "not JSON"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(row)
    with pytest.raises(DataError, match=message):
        list(FileCorpus((path,)).documents())


def test_a_configuration_may_name_several(tmp_path: Path, wordnet: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    corpora = read_corpora({"folder": tmp_path, "wordnet": str(wordnet)})
    assert [len(list(corpus.documents())) for corpus in corpora] == [1, 8]
    assert read_corpora({"wordnet": False}) == []


def test_a_folder_has_no_hidden_documents_and_none_from_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / ".corpus"
    (folder / ".git").mkdir(parents=True)
    for name in ("a.txt", ".b.txt", ".git/c.txt", "../mine.txt"):
        (folder / name).write_text(name)
    (folder / "d.md").symlink_to("a.txt")
    (folder / "e.md").symlink_to("../mine.txt")
    (corpus,) = read_corpora({"folder": str(folder)})
    assert [document.title for document in corpus.documents()] == ["a", "d"]
