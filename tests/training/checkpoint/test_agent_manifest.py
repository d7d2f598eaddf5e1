"""Which files of an agent folder have a checksum, and which links are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from toolwise.errors import CheckpointError
from toolwise.training.checkpoint.agent_manifest import (
    AGENT_FILE,
    AgentManifest,
    update_file,
    verify_agent,
    write_manifest,
)
from toolwise.training.checkpoint.loader import FileEntry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An agent folder, beside a file that is none of its business."""
    folder = tmp_path / "agent"
    (folder / "documents/0").mkdir(parents=True)
    (folder / "documents/0/notes.md").write_text("Alder has 12 mills.")
    (folder / "config.json").write_text("{}")
    (tmp_path / "mine.txt").write_text("my secret")
    write_manifest(folder, "x", 1, {})
    return folder


@pytest.mark.parametrize(
    "name",
    ["documents/0/more.md", "documents/0/.hidden.txt", ".hidden", "documents/LICENSE.txt", "documents/README.md"],
)
def test_a_file_anywhere_below_is_an_added_file(name: str, folder: Path) -> None:
    (folder / name).write_text("x")
    with pytest.raises(CheckpointError, match="was added after"):
        verify_agent(folder)


def test_a_changed_document_is_refused(folder: Path) -> None:
    (folder / "documents/0/notes.md").write_text("Alder has 13 mills.")
    with pytest.raises(CheckpointError, match=r"notes\.md is not what was exported"):
        verify_agent(folder)


def test_a_publisher_and_other_programs_may_add_their_files(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".cache/huggingface").mkdir(parents=True)
    for name in (
        "README.md",
        "LICENSE",
        "NOTICE.txt",
        ".gitattributes",
        ".git/HEAD",
        ".cache/huggingface/x",
        ".DS_Store",
    ):
        (folder / name).write_text("x")
    (folder / "documents/.DS_Store").write_text("x")
    verify_agent(folder)


@pytest.mark.parametrize(
    "name", ["README.md", ".DS_Store", "LICENSE", "documents/0/.hidden.txt", "documents/1", ".git"]
)
def test_a_link_that_leads_out_of_the_folder_is_refused(name: str, folder: Path) -> None:
    outside = folder.parent / ("" if name in ("documents/1", ".git") else "mine.txt")
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a link that leads out of the folder") as told:
        verify_agent(folder)
    assert "\n" not in str(told.value)


def test_a_file_with_a_checksum_is_no_link_to_elsewhere_either(folder: Path) -> None:
    (folder / "notes.txt").symlink_to(folder.parent / "mine.txt")
    write_manifest(folder, "x", 1, {})
    with pytest.raises(CheckpointError, match="is a link that leads out of the folder"):
        verify_agent(folder)


def test_links_within_the_folder_and_those_of_the_hubs_cache_are_read(folder: Path) -> None:
    (folder / "README.md").symlink_to("documents/0/notes.md")
    verify_agent(folder)
    snapshot = folder.parent / "models--me--agent/snapshots/abc"
    (snapshot.parent.parent / "blobs").mkdir(parents=True)
    folder.rename(snapshot.parent.parent / "blobs/parts")
    (snapshot / "documents/0").mkdir(parents=True)
    for name in (AGENT_FILE, "config.json", "documents/0/notes.md"):
        (snapshot / name).symlink_to(snapshot.parent.parent / "blobs/parts" / name)
    verify_agent(snapshot)


def test_a_folder_of_the_first_format_is_read_unless_it_has_files_without_a_checksum(folder: Path) -> None:
    """That format has none of Markdown documents and hidden files."""
    entry = FileEntry(size=2, sha256=hashlib.sha256(b"{}").hexdigest())
    manifest = AgentManifest(format=1, files={"config.json": entry})
    manifest.seal = manifest.digest()
    (folder / AGENT_FILE).write_text(manifest.model_dump_json())
    with pytest.raises(
        CheckpointError, match=r"notes\.md has no checksum in an agent of format 1: export the agent again"
    ):
        verify_agent(folder)
    (folder / "documents/0/notes.md").rename(folder / "documents/0/.notes")
    with pytest.raises(CheckpointError, match="has no checksum"):
        verify_agent(folder)
    (folder / "documents/0/.notes").unlink()
    assert verify_agent(folder).format == 1
    update_file(folder, "config.json", b"[]")
    assert verify_agent(folder).format == 1
    (folder / "README.md").symlink_to(folder.parent / "mine.txt")
    with pytest.raises(CheckpointError, match="is a link that leads out of the folder"):
        verify_agent(folder)
