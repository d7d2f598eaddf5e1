"""What hostile reward code does to the folder that it may write to: races against whoever tidies it, trees that are hard to
remove, and more bytes and files than it may have. Each case asserts what happened outside: see `Ground` in abuse_cases."""
# ruff: noqa: E501 (a case is a line of hostile code)

from __future__ import annotations

from abuse_case import Case

RACE = """
import _thread
_libc = ctypes.CDLL(None)
_renameat2 = {'x86_64': 316}.get(os.uname().machine, 276)

def swap(a, b):
    a, b = a.encode(), b.encode()
    while True: _libc.syscall(_renameat2, -100, a, -100, b, 2)  # RENAME_EXCHANGE; lets go of the interpreter

def beside(*work):
    for function, *arguments in work: _thread.start_new_thread(function, tuple(arguments))

def again(work):
    while True:
        try: work()
        except OSError: pass

def tree(name, width, depth=1):
    os.makedirs(name, exist_ok=True)
    for i in range(width):
        d = name + f'/d{i}'
        os.mkdir(d)
        for j in range(depth):
            d += '/e'
            os.mkdir(d)

def touch(name): open(name, 'w').close()
"""
FILL = """
import _thread
MB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)

def number(name):
    return {'fallocate': (285, 47), 'copy_file_range': (326, 285), 'splice': (275, 76)}[name][os.uname().machine != 'x86_64']

def deep(levels, name='n' * 200):
    for _ in range(levels):
        os.mkdir(name); os.chdir(name)

def fill(descriptor, mb=8):
    block = bytes(MB)
    for _ in range(mb): os.write(descriptor, block)

def new(name, flags=0): return os.open(name, os.O_RDWR | os.O_CREAT | flags, 0o600)
"""


def _race(name: str, body: str, kind: str = "ok died exception timeout too_big", replaced: bool | None = True) -> Case:
    """The race goes on when the call returns, until the worker is ended."""
    return Case(f"race_{name}", kind, f"{body}\ntime.sleep(0.03); return 1.0", RACE, replaced=replaced)


RACES = [
    _race("folder_and_link", "os.mkdir('a'); os.symlink(truth['victim'], 'b'); beside((swap, 'a', 'b'))"),
    _race("two_threads", "os.mkdir('a'); os.symlink(truth['victim'], 'b'); beside((swap, 'a', 'b'), (swap, 'a', 'b'))"),
    _race("full_folder_and_link", "tree('a', 50); os.symlink(truth['victim'], 'b'); beside((swap, 'a', 'b'))"),
    _race("deep_folder_and_link", "tree('a', 2, 300); os.symlink(truth['victim'], 'b'); beside((swap, 'a', 'b'), (swap, 'a', 'b'))"),
    _race("closed_folder_and_link", "os.mkdir('a', 0); os.symlink(truth['victim'], 'b'); beside((swap, 'a', 'b'))"),
    _race("closed_in_closed_and_link", "os.mkdir('a'); os.mkdir('a/x', 0o300); os.mkdir('a/x/y', 0); os.symlink(truth['victim'], 'b'); beside((swap, 'a', 'b'))"),
    _race("link_within", "tree('t', 3); os.symlink(truth['victim'], 't/b'); beside((swap, 't/d0', 't/b'), (swap, 't/d1', 't/b'))"),
    _race("link_far_within", "tree('t', 2, 40); p = 't/d0' + '/e' * 39; os.symlink(truth['victim'], p + '/b'); beside((swap, p + '/e', p + '/b'))"),
    _race("folder_and_link_to_a_file", "os.mkdir('a'); os.symlink(truth['victim'] + '/closed', 'b'); beside((swap, 'a', 'b'))"),
    _race("folder_and_link_to_everything", "os.mkdir('a'); os.symlink('/', 'b'); beside((swap, 'a', 'b'))"),
    _race("folder_and_link_to_its_parent", "os.mkdir('a'); os.symlink('..', 'b'); beside((swap, 'a', 'b'))"),
    _race("folder_and_link_to_itself", "os.mkdir('a'); os.symlink('b', 'b'); beside((swap, 'a', 'b'))"),
    _race("folder_and_link_to_a_device", "os.mkdir('a'); os.symlink('/dev/zero', 'b'); beside((swap, 'a', 'b'))"),
    _race("folder_and_relative_link", "os.mkdir('a'); os.symlink(os.path.relpath(truth['victim']), 'b'); beside((swap, 'a', 'b'))"),
    _race("file_and_folder", "os.mkdir('a'); touch('b'); beside((swap, 'a', 'b'))"),
    _race("file_and_full_folder", "tree('a', 50); touch('b'); beside((swap, 'a', 'b'), (swap, 'a', 'b'))"),
    _race("file_and_link", "touch('a'); os.symlink(truth['victim'], 'b'); beside((swap, 'a', 'b'))"),
    _race("file_and_link_to_a_secret", "touch('a'); os.symlink(truth['secret'], 'b'); beside((swap, 'a', 'b'))"),
    _race("three_of_a_kind", "os.mkdir('a'); touch('b'); os.symlink(truth['victim'], 'c'); beside((swap, 'a', 'b'), (swap, 'b', 'c'), (swap, 'a', 'c'))"),
    _race("many_pairs", "for i in range(6): os.mkdir(f'a{i}'); os.symlink(truth['victim'], f'b{i}'); beside((swap, f'a{i}', f'b{i}'))"),
    _race("always_there", "os.mkdir('a'); os.symlink(truth['victim'], 'b'); beside((swap, 'a', 'b'), (again, lambda: os.mkdir('a')), (again, lambda: os.symlink(truth['victim'], 'b')), (again, lambda: os.symlink(truth['victim'], 'a')))"),
    _race("always_there_and_full", "tree('a', 30); os.symlink(truth['victim'], 'b'); beside((swap, 'a', 'b'), (again, lambda: os.makedirs('a/x/y')), (again, lambda: os.symlink(truth['victim'], 'b')), (again, lambda: os.symlink(truth['victim'], 'a')))"),
    _race("always_there_and_closed", "os.mkdir('a', 0); os.symlink(truth['victim'], 'b'); beside((swap, 'a', 'b'), (again, lambda: os.mkdir('a', 0)), (again, lambda: os.symlink(truth['victim'], 'b')), (again, lambda: os.symlink(truth['victim'], 'a')))"),
    _race("renames", "os.mkdir('a'); beside((again, lambda: (os.rename('a', 'b'), os.rename('b', 'a'))))"),
    _race("moves_into_another", "os.mkdir('a'); os.mkdir('b'); beside((again, lambda: (os.rename('a', 'b/a'), os.rename('b/a', 'a'))))"),
    _race("files_for_ever", "beside(*[(again, lambda n=n: touch(f'{n}-{time.monotonic_ns()}')) for n in range(3)])"),
    _race("folders_for_ever", "beside((again, lambda: os.mkdir(str(time.monotonic_ns()))))"),
    _race("a_folder_comes_back", "beside((again, lambda: os.makedirs('a/b/c/d/e')))"),
    _race("a_file_comes_back", "beside((again, lambda: touch('x')))"),
    _race("links_come_back", "beside((again, lambda: os.symlink(truth['victim'], 'x')))"),
    _race("deeper_and_deeper", "beside((again, lambda: (os.mkdir('d'), os.chdir('d'))))"),
    _race("names_of_the_broom", "os.makedirs('a/b/c')\nfor i in range(300): os.makedirs(f'.removed-{i}/x')\nbeside((swap, 'a/b', '.removed-7'))"),
    _race(
        "without_threads",
        "os.mkdir('a'); os.symlink(truth['victim'], 'b')\nsignal.signal(signal.SIGALRM, lambda *_: os.rename('b', 'c') if os.path.lexists('b') else None); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)",
    ),
]  # fmt: skip
CLEANUP = [
    Case("left_closed_folder", "ok", "os.mkdir('a', 0); return 1.0", score=1.0),
    Case("left_half_closed_folder", "ok", "os.mkdir('a', 0o300); open('a/f', 'w').close(); os.mkdir('a/b', 0o100); return 1.0", score=1.0),
    Case("left_closed_tree", "ok", "for i in range(10): os.mkdir(f'd{i}', 0o700); os.mkdir(f'd{i}/c', 0); open(f'd{i}/f', 'w').close()\nreturn 1.0", score=1.0),
    Case("left_deep_tree", "ok too_big", "for i in range(600): os.mkdir('d'); os.chdir('d')\nreturn 1.0", replaced=True),
    Case("left_deep_tree_of_long_names", "ok too_big", "for i in range(100): os.mkdir('n' * 250); os.chdir('n' * 250)\nreturn 1.0", replaced=True),
    Case("left_deep_tree_at_home", "ok too_big", "home = os.getcwd()\nfor i in range(600): os.mkdir('d'); os.chdir('d')\nos.chdir(home); return 1.0"),
    Case("left_link_to_the_victim", "ok", "os.symlink(truth['victim'], 'a'); os.symlink(truth['victim'] + '/closed', 'b'); return 1.0", score=1.0, replaced=False),
    Case("left_links_in_circles", "ok", "os.symlink('b', 'a'); os.symlink('a', 'b'); os.symlink('.', 'c'); os.symlink('..', 'd'); return 1.0", score=1.0, replaced=False),
    Case("left_odd_names", "ok", "for n in [b'\\n', b'\\xff\\xfe', b'-rf', b' ', b'...', b'a' * 255, b'*', b'$(x)', b'\\x1b[2J']: open(n, 'w').close(); os.mkdir(n + b'd' if len(n) < 255 else b'q')\nreturn 1.0", score=1.0, replaced=False),
    Case("left_names_of_the_broom", "ok", "os.makedirs('x/y/z/w')\nfor i in range(15): os.makedirs(f'.removed-{i}/a/b'); open(f'.removed-{i}/f', 'w').close()\nfor i in range(15, 30): open(f'.removed-{i}', 'w').close()\nreturn 1.0", score=1.0, replaced=False),
    Case("left_hard_links", "ok", "open('a', 'w').write('x')\nfor i in range(200): os.link('a', f'b{i}')\nreturn 1.0", score=1.0, replaced=False),
    Case("left_many_folders", "ok", "for i in range(20): os.makedirs(f'{i}/a')\nreturn 1.0", score=1.0, replaced=False),
    Case("left_its_folder_gone", "ok", "os.mkdir('d'); os.chdir('d'); os.rmdir(os.getcwd()); return 1.0", score=1.0, replaced=True),
    Case("left_open_folder", "ok", "os.mkdir('d'); globals()['d'] = os.open('d', os.O_RDONLY); os.open('f', os.O_CREAT | os.O_WRONLY, dir_fd=d); return 1.0", score=1.0),
    Case("left_nameless_file", "ok", "globals()['f'] = open('x', 'wb'); f.write(bytes(50000)); f.flush(); os.unlink('x'); return 1.0", score=1.0, replaced=True),
    Case("left_nameless_map", "ok", "globals()['f'] = open('x', 'w+b'); f.write(bytes(50000)); f.flush(); globals()['m'] = mmap.mmap(f.fileno(), 50000); os.unlink('x'); return 1.0", score=1.0, replaced=True),
    Case("left_read_only_file", "ok", "os.close(os.open('x', os.O_CREAT | os.O_WRONLY, 0)); return 1.0", score=1.0, replaced=False),
    Case("left_pipe", "denied ok exception", "os.mkfifo('p'); return 1.0"),
    Case("left_immutable_file", "ok exception denied", "f = open('x', 'w'); fcntl.ioctl(f, 0x40086602, struct.pack('l', 0x10)); return 1.0"),
    Case("sees_nothing_of_the_last_call", "ok", "n = len(os.listdir('.')); os.makedirs('a/b'); open('a/c', 'w').close(); return float(n)", score=0.0, replaced=False),
]  # fmt: skip


def _fill(name: str, body: str, kind: str = "too_big", score: float | None = None) -> Case:
    return Case(f"fill_{name}", kind, body, FILL, score)


QUOTA = [
    _fill("long_paths", "deep(30)\nfor i in range(60): fill(new(f'x{i}'))\nreturn 1.0", "too_big exception"),
    _fill("long_paths_by_descriptors", "d = os.open('.', os.O_RDONLY)\nfor _ in range(30):\n    os.mkdir('n' * 200, dir_fd=d); e = os.open('n' * 200, os.O_RDONLY, dir_fd=d); os.close(d); d = e\nfor i in range(60):\n    x = os.open(f'x{i}', os.O_CREAT | os.O_WRONLY, dir_fd=d); fill(x); os.close(x)\nreturn 1.0"),
    _fill("deep_folders", "deep(70, 'd')\nfor i in range(60):\n    x = new(f'x{i}'); fill(x); os.close(x)\nreturn 1.0"),
    _fill("nameless_files", "for i in range(50): x = new('x'); os.unlink('x'); fill(x)\nreturn 1.0"),
    _fill("nameless_from_the_start", "for i in range(50): fill(os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600))\nreturn 1.0"),
    _fill("temporary_files", "import tempfile\nk = []\nfor i in range(50): k.append(tempfile.TemporaryFile()); fill(k[-1].fileno())\nreturn 1.0"),
    _fill("maps", "k = []\nfor i in range(20):\n    x = new('x'); os.ftruncate(x, 8 * MB); m = mmap.mmap(x, 8 * MB); os.unlink('x'); os.close(x); k.append(m)\n    for p in range(0, 8 * MB, 4096): m[p] = 1\nreturn 1.0", "too_big memory died"),
    _fill("maps_without_descriptors", "_libc.mmap.restype = ctypes.c_void_p\nfor i in range(50):\n    x = new('x'); fill(x); os.unlink('x'); assert _libc.mmap(None, 4096, 1, 2, x, ctypes.c_long(0)); os.close(x)\nreturn 1.0"),
    _fill("maps_of_shared_memory", "_libc.mmap.restype = ctypes.c_void_p\nfor i in range(50):\n    x = new('x'); fill(x); os.unlink('x'); assert _libc.mmap(None, 4096, 3, 1, x, ctypes.c_long(0)); os.close(x)\nreturn 1.0"),
    _fill("reserved", "for i in range(20): x = new(f'x{i}'); system(number('fallocate'), x, 0, ctypes.c_long(0), ctypes.c_long(24 * MB))\nreturn 1.0", "too_big exception denied"),
    _fill("reserved_beyond_the_end", "for i in range(20): x = new(f'x{i}'); system(number('fallocate'), x, 1, ctypes.c_long(0), ctypes.c_long(24 * MB))\nreturn 1.0", "too_big exception denied"),
    _fill("reserved_and_nameless", "for i in range(20): x = new('x'); os.unlink('x'); os.posix_fallocate(x, 0, 24 * MB)\nreturn 1.0", "too_big exception denied"),
    _fill("descriptors_on_their_way", "a, b = socket.socketpair()\nfor i in range(50):\n    x = new('x'); os.unlink('x'); fill(x); socket.send_fds(a, [b'x'], [x]); os.close(x)\nreturn 1.0", "too_big denied"),
    _fill("over_standard_input", "for i in range(50): x = new('x'); os.unlink('x'); os.dup2(x, 0); os.close(x); fill(0)\nreturn 1.0", "ok too_big timeout"),
    _fill("memory_files", "for i in range(50): fill(os.memfd_create('x'))\nreturn 1.0", "denied"),
    _fill("one_file", "x = new('x'); fill(x, 200); return 1.0"),
    _fill("one_file_by_position", "x = new('x')\nfor i in range(200): os.pwrite(x, bytes(MB), i * MB)\nreturn 1.0"),
    _fill("far_away", "x = new('x'); os.pwrite(x, b'x', 1 << 40); return 1.0"),
    _fill("many_files", "for i in range(60):\n    x = new(f'x{i}'); fill(x); os.close(x)\nreturn 1.0"),
    _fill("folders_full_of_files", "for i in range(60):\n    os.mkdir(f'd{i}'); x = new(f'd{i}/x'); fill(x); os.close(x)\nreturn 1.0"),
    _fill("closed_folders", "for i in range(60):\n    os.mkdir(f'd{i}', 0o300); x = new(f'd{i}/x'); fill(x); os.close(x)\nreturn 1.0"),
    _fill("small_files", "for i in range(400000):\n    x = new(f'x{i}'); os.write(x, b'x'); os.close(x)\nreturn 1.0", "too_big timeout"),
    _fill("empty_files", "for i in range(400000): os.close(new(f'x{i}'))\nreturn 1.0", "too_big timeout"),
    _fill("empty_folders", "for i in range(400000): os.mkdir(f'x{i}')\nreturn 1.0", "too_big timeout"),
    _fill("links", "for i in range(400000): os.symlink('n' * 4000, f'x{i}')\nreturn 1.0", "too_big timeout"),
    _fill("hard_links", "os.close(new('x'))\nfor i in range(400000): os.link('x', f'x{i}')\nreturn 1.0", "too_big timeout exception"),
    _fill("by_many_threads", "def work(n):\n    for i in range(40):\n        x = new(f'{n}-{i}'); fill(x); os.close(x)\nt = [threading.Thread(target=work, args=[n]) for n in range(4)]\n[x.start() for x in t]; [x.join() for x in t]; return 1.0", "too_big ok"),
    _fill("by_a_thread_left_behind", "def work():\n    for i in range(60):\n        x = new(f'x{i}'); fill(x); os.close(x)\n_thread.start_new_thread(work, ()); time.sleep(0.02); return 1.0", "ok too_big"),
    _fill("and_swallows_the_error", "for i in range(60):\n    x = new(f'x{i}')\n    try: fill(x)\n    except OSError: pass\n    os.close(x)\nreturn 1.0", "ok too_big"),
    _fill("and_removes_it_in_time", "for i in range(40):\n    x = new('x'); os.unlink('x')\n    try: fill(x, 30)\n    finally: os.close(x)\nreturn 1.0", "ok timeout", None),
    _fill("copies_in_the_kernel", "a = new('a'); fill(a, 8)\nfor i in range(40):\n    x = new(f'x{i}'); os.copy_file_range(a, x, 8 * MB, 0, 0); os.close(x)\nreturn 1.0"),
    _fill("sends_in_the_kernel", "a = new('a'); fill(a, 8)\nfor i in range(40):\n    x = new(f'x{i}'); os.sendfile(x, a, 0, 8 * MB); os.close(x)\nreturn 1.0"),
    _fill("appends", "for i in range(60):\n    x = new(f'x{i % 8}', os.O_APPEND); fill(x, 7); os.close(x)\nreturn 1.0"),
    _fill("on_import", "return 1.0", "too_big import"),
    _fill("sparse_files_take_nothing", "for i in range(10): x = new(f'x{i}'); os.ftruncate(x, 30 * MB); os.close(x)\nreturn 1.0", "ok", 1.0),
    _fill("within_the_limit", "for i in range(3):\n    x = new(f'x{i}'); fill(x, 8); os.close(x)\nreturn 1.0", "ok", 1.0),
    _fill("within_the_limit_again_and_again", "for i in range(10):\n    x = new('x'); fill(x, 8); os.close(x); os.unlink('x')\nreturn 1.0", "ok", 1.0),
]  # fmt: skip
QUOTA = [
    case if case.name != "fill_on_import" else Case(case.name, case.kind, case.body, f"{FILL}\nfor i in range(60): x = new(f'x{{i}}'); fill(x); os.close(x)")
    for case in QUOTA
]  # fmt: skip
FILE_CASES = [*RACES, *CLEANUP, *QUOTA]
