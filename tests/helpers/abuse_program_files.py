"""What model-written programs do to the folders that they may write to: (name, language, text, kinds). `{victim}` is a folder
outside that must stay as it is; other braces are doubled."""
# ruff: noqa: E501 (a case is a line of hostile code)

from __future__ import annotations

FILL = """
import ctypes, itertools, mmap, os, sys, time
MB = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)
def fill(x, mb=8):
    for _ in range(mb): os.write(x, bytes(MB))
def new(name): return os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
"""
RACE = """
import _thread, ctypes, os, time
libc = ctypes.CDLL(None)
number = 316 if os.uname().machine == 'x86_64' else 276
def swap(a, b):
    while True: libc.syscall(number, -100, a.encode(), -100, b.encode(), 2)
def again(work):
    while True:
        try: work()
        except OSError: pass
"""
_ENDS = "ok died timeout too_big"


def _fill(name: str, text: str, kinds: str = "too_big") -> tuple[str, str, str, str]:
    return (f"fill_{name}", "python", FILL + text, kinds)


def _race(name: str, text: str) -> tuple[str, str, str, str]:
    """The threads go on until the process ends."""
    return (f"race_{name}", "python", f"{RACE}{text}\ntime.sleep(0.05); os._exit(0)", "ok died")


def _left(name: str, text: str, kinds: str = "ok") -> tuple[str, str, str, str]:
    return (f"left_{name}", "python", f"import os\n{text}", kinds)


PYTHON_FILES = [
    _fill("long_paths", "for _ in range(30): os.mkdir('n' * 200); os.chdir('n' * 200)\nfor i in range(60): fill(new('x%d' % i))", "too_big exit"),
    _fill("nameless_files", "for i in range(50): x = new('x'); os.unlink('x'); fill(x)"),
    _fill("nameless_from_the_start", "for i in range(50): fill(os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600))"),
    _fill("nameless_temporary_files", "import tempfile\nk = []\nfor i in range(50): k.append(tempfile.TemporaryFile()); fill(k[-1].fileno())"),
    _fill("temporary_files", "import tempfile\nfor i in range(50): x = tempfile.mkstemp()[0]; fill(x); os.close(x)"),
    _fill("both_folders", "import tempfile\nfor i in range(50):\n    x = tempfile.mkstemp()[0]; fill(x, 2); os.close(x)\n    x = new('x%d' % i); fill(x, 2); os.close(x)"),
    _fill("maps", "libc.mmap.restype = ctypes.c_void_p\nfor i in range(50):\n    x = new('x'); fill(x); os.unlink('x'); assert libc.mmap(None, 4096, 3, 1, x, ctypes.c_long(0)); os.close(x)"),
    _fill("reserved", "for i in range(20): os.posix_fallocate(new('x%d' % i), 0, 24 * MB)"),
    _fill("descriptors_on_their_way", "import socket\na, b = socket.socketpair()\nfor i in range(50):\n    x = new('x'); os.unlink('x'); fill(x); socket.send_fds(a, [b'x'], [x]); os.close(x)", "too_big denied"),
    _fill("many_files", "for i in range(60): x = new('x%d' % i); fill(x); os.close(x)"),
    _fill("closed_folders", "for i in range(60):\n    os.mkdir('d%d' % i, 0o300); x = new('d%d/x' % i); fill(x); os.close(x)"),
    _fill("empty_files", "for i in range(400000): os.close(new('x%d' % i))", "too_big timeout"),
    _fill("empty_folders", "for i in range(400000): os.mkdir('x%d' % i)", "too_big timeout"),
    _fill("hard_links", "os.close(new('x'))\nfor i in range(400000): os.link('x', 'x%d' % i)", "too_big timeout exit"),
    _fill("many_names_of_one_large_file", "x = new('x'); fill(x, 20)\nfor i in range(200): os.link('x', 'x%d' % i)", "ok"),
    _fill("sparse_files_take_nothing", "for i in range(20): os.ftruncate(new('x%d' % i), 30 * MB)", "ok"),
    _fill("within_the_limit", "for i in range(3): fill(new('x%d' % i))", "ok"),
    _race("folder_and_link", "os.mkdir('a'); os.symlink({victim!r}, 'b'); _thread.start_new_thread(swap, ('a', 'b'))"),
    _race("always_there", "for w in (lambda: os.mkdir('a', 0), lambda: os.symlink({victim!r}, 'a'), lambda: os.symlink({victim!r}, 'b')): _thread.start_new_thread(again, (w,))\n_thread.start_new_thread(swap, ('a', 'b'))"),
    _race("file_and_folder", "os.mkdir('a'); open('b', 'w').close(); _thread.start_new_thread(swap, ('a', 'b'))"),
    _left("deep_tree", "for i in range(500): os.mkdir('d'); os.chdir('d')", "ok too_big"),
    _left("closed_tree", "os.mkdir('a'); os.mkdir('a/b', 0o300); open('a/b/c', 'w').write('x'); os.mkdir('a/b/d', 0); os.close(os.open('f', os.O_CREAT | os.O_WRONLY, 0))"),
    _left("links", "os.symlink({victim!r}, 'a'); os.symlink({victim!r} + '/closed', 'b'); os.symlink('c', 'c'); os.mkdir('d'); os.symlink('..', 'd/e')"),
    _left("odd_names", "for n in [b'\\n', b'\\xff', b'-rf', b'a' * 255, b'.removed-1']: open(n, 'w').close()"),
]  # fmt: skip
SHELL_FILES = [
    ("fill_many_processes", "shell", "for i in 1 2 3 4 5 6; do (head -c 30000000 /dev/zero > f$i) & done; wait; sleep 1", "too_big died"),
    ("fill_nameless_files", "shell", "for i in 1 2 3 4 5 6; do (exec 5>x$i; rm x$i; head -c 30000000 /dev/zero >&5; sleep 5) & done; sleep 5", "too_big died"),
    ("fill_temporary", "shell", "for i in 1 2 3 4 5 6; do head -c 20000000 /dev/zero > $TMPDIR/f$i; done; sleep 1", "too_big"),
    ("fill_deep", "shell", "for i in 1 2 3 4 5 6 7 8 9; do mkdir d; cd d; head -c 8000000 /dev/zero > f; done; sleep 1", "too_big"),
    ("race_renames", "shell", "mkdir a; ln -s {victim} b; (while :; do mv -T a c; mv -T b a; mv -T c b; mv -T a c; mv -T b a; mv -T c b; done) 2>/dev/null & sleep 0.1", "ok"),
    ("left_links", "shell", "mkdir -p a/b; ln -s {victim} a/b/c; ln -s {victim} d; ln -s d e", "ok"),
]  # fmt: skip
PROGRAM_FILES = [*PYTHON_FILES, *SHELL_FILES]
