"""What hostile or clumsy reward code does, one case each, and what must come of it. Run by test_abuse.py, and as a
program by a user without privileges: `python abuse_cases.py FOLDER [all]` prints one line of JSON a case."""
# ruff: noqa: E501 (a case is a line of hostile code)

from __future__ import annotations

import itertools
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from abuse_case import Case
from abuse_disk import alone_on_the_disk
from abuse_files import FILE_CASES, RACES

TIMEOUT_S, GRACE_S = 0.6, 0.5
SECRET = "correct-horse-battery-staple"
MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    kind: str
    message: str
    score: float | None
    seconds: float
    replaced: bool
    left_behind: list[str]
    next_score: float | None
    """What a harmless call right after it gave."""
    disk_mb: float = 0.0
    disk_limit_mb: float = 0.0
    """The most that it had on disk at once, seen from outside, and what it may have had."""


LOOPS = [
    Case("loop_in_python", "timeout", "while True: pass"),
    Case("loop_in_c", "timeout", "re.match('(a+)+$', 'a' * 60 + 'b')"),
    Case("loop_in_c_without_signals", "timeout", "return sum(itertools.repeat(0))"),
    Case("huge_power", "timeout", "return 3 ** (10 ** 9)"),
    Case("loop_on_import", "timeout", module="while True: pass"),
    Case(
        "loop_in_del", "timeout", "return R(1.0)", "class R(float):\n    def __del__(self):\n        while True: pass"
    ),
    Case(
        "loop_in_del_of_a_cycle",
        "timeout",
        "c = C(); c.me = c; del c; return 1.0",
        "class C:\n    def __del__(self):\n        while True: pass",
    ),
    Case(
        "loop_in_repr_of_exception",
        "timeout",
        "raise E()",
        "class E(Exception):\n    def __str__(self):\n        while 1: pass",
    ),
    Case("ignored_sigterm", "timeout", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"),
    Case(
        "swallows_everything",
        "timeout",
        "while True:\n    try:\n        while True: time.sleep(1)\n    except BaseException: pass",
    ),
    Case("sleeps", "timeout", "time.sleep(3600)"),
    Case("deadlock", "timeout", "l = threading.Lock(); l.acquire(); l.acquire()"),
    Case("waits_for_stdin", "ok", "return 0.0 if sys.stdin is None or sys.stdin.read() == '' else 1.0", score=0.0),
    Case("blocked_signals_loop", "timeout", "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: pass"),
]
BOMBS = [
    Case("fork_bomb", "denied", "for _ in range(20): os.fork()\nreturn 1.0"),
    Case(
        "thread_bomb", "exception memory timeout", "while True: threading.Thread(target=time.sleep, args=(60,)).start()"
    ),
    Case("memory_in_one_piece", "memory", "x = bytearray(10 ** 9); return 1.0"),
    Case("memory_bit_by_bit", "memory", "x = []\nwhile True: x.append(bytearray(10 ** 6))"),
    Case("memory_of_strings", "memory", "return 'a' * 10 ** 10"),
    Case("memory_in_lists", "memory", "x = [0]\nwhile True: x = x + x"),
    Case("memory_private_map", "memory", "m = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE); return 1.0"),
    Case("memory_shared", "denied", "m = mmap.mmap(-1, 1 << 20); return 1.0"),
    Case(
        "memory_of_which_a_page_is_kept",
        "denied",
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        for _ in range(20):  # shared, without a file
            at = libc.mmap(None, ctypes.c_size_t(20 << 20), 3, 0x21, -1, ctypes.c_long(0))
            if at == ctypes.c_void_p(-1).value: raise OSError(ctypes.get_errno(), 'mmap')
            ctypes.memset(at, 1, 20 << 20)
            libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t((20 << 20) - 4096))
        return 1.0
        """,
    ),
    Case(
        "memory_in_a_pipe",
        "denied",
        """
        page = ctypes.create_string_buffer(4096)
        piece = (ctypes.c_size_t * 2)(ctypes.addressof(page), 4096)
        system({'x86_64': 278}.get(os.uname().machine, 75), os.pipe()[1], piece, 1, 0)
        return 1.0
        """,
    ),
    Case("descriptors_of_a_thread", "denied", "system(436, 4000, 4001, 2); return 1.0"),
    Case(
        "descriptors_of_a_raw_thread",
        "denied",
        """
        libc = ctypes.CDLL(None, use_errno=True)
        stack = ctypes.create_string_buffer(65536)
        top = ctypes.c_void_p(ctypes.addressof(stack) + 65536 - 64 & ~15)
        if libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, 0x10900, None) < 0:
            raise OSError(ctypes.get_errno(), 'clone')
        return 1.0
        """,
    ),
    Case("memory_on_import", "memory", module="x = bytearray(10 ** 9)"),
    Case("memory_within_limit", "ok", "x = bytearray(40_000_000); return 1.0", score=1.0),
    Case("one_huge_file", "too_big", "with open('x', 'wb') as f:\n    for _ in range(1000): f.write(bytes(10 ** 6))"),
    Case(
        "many_large_files",
        "too_big timeout",
        "for i in itertools.count():\n    with open(f'x{i}', 'wb') as f: f.write(os.urandom(10 ** 6))",
    ),
    Case(
        "many_files_and_words",
        "too_big timeout",
        "for i in itertools.count():\n    print('x' * 9999)\n    with open(f'x{i}', 'wb') as f: f.write(bytes(10 ** 6))",
    ),
    Case("many_files", "too_big timeout", "for i in itertools.count(): open(f'x{i}', 'w').close()"),
    Case("deep_folders", "ok exception timeout", "for i in range(3000): os.mkdir('d'); os.chdir('d')\nreturn 1.0"),
    Case("closed_folders", "ok denied", "os.mkdir('d', 0); return 1.0"),
    Case("stdout_without_end", "timeout", "while True: print('x' * 10000)"),
    Case("stdout_much", "ok", "for _ in range(2000): print('x' * 10000)\nreturn 1.0", score=1.0),
    Case("stderr_raw", "ok", "os.write(2, b'x' * 300_000); return 1.0", score=1.0),
    Case("reason_cut_short", "ok", "return EvaluateResult(score=1.0, reason='x' * 20_000_000)", score=1.0),
    Case("result_too_big", "too_big", "return {'score': 1.0, 'metrics': {str(n): 1.0 for n in range(20_000)}}"),
    Case("exception_too_big", "exception", "raise ValueError('x' * 20_000_000)"),
    Case("descriptors", "exception", "x = []\nwhile True: x.append(open('/dev/null'))"),
    Case("deep_recursion", "exception", "def g(): g()\ng()"),
    Case("deep_recursion_without_limit", "died memory timeout", "sys.setrecursionlimit(10 ** 9)\ndef g(): g()\ng()"),
    Case(
        "deep_result",
        "bad_type exception too_big",
        "d = {}\nfor _ in range(50_000): d = {'a': d}\n"
        "return EvaluateResult(score=1.0, step_outputs=[StepOutput(step_index=0, base_reward=1.0, metrics=d)])",
    ),
    Case(
        "many_steps",
        "ok",
        "return EvaluateResult(score=1.0, step_outputs=[StepOutput(step_index=i, base_reward=0.0) for i in range(1000)])",
    ),
]
FILES = [
    Case("write_in_tmp", "denied", "open(truth['folder'] + '/new', 'w').write('x'); return 1.0"),
    Case("write_own_file", "denied", "open(__file__, 'a').write('x'); return 1.0"),
    Case("truncate_own_file", "denied", "os.truncate(__file__, 0); return 1.0"),
    Case("remove_a_secret", "denied", "os.unlink(truth['secret']); return 1.0"),
    Case("rename_a_secret", "denied exception", "os.rename(truth['secret'], 'mine'); return 1.0"),
    Case("make_a_folder", "denied", "os.mkdir(truth['folder'] + '/new'); return 1.0"),
    Case("chmod_a_secret", "denied", "os.chmod(truth['secret'], 0o777); return 1.0"),
    Case("chown_a_secret", "denied", "os.chown(truth['secret'], os.getuid(), -1); return 1.0"),
    Case("touch_a_secret", "denied", "os.utime(truth['secret']); return 1.0"),
    Case("attribute_of_a_secret", "denied", "os.setxattr(truth['secret'], 'user.x', b'x'); return 1.0"),
    Case("hard_link", "denied exception", "os.link(truth['secret'], 'mine'); return open('mine').read() and 1.0"),
    Case("symbolic_link", "denied", "os.symlink(truth['secret'], 'mine'); return open('mine').read() and 1.0"),
    Case("secret_beside_the_reward", "denied", "return open(truth['secret']).read() and 1.0"),
    Case("list_beside_the_reward", "denied", "return len(os.listdir(truth['folder']))"),
    Case("import_beside_the_reward", "ok", "import neighbour; return float(neighbour.x)", score=1.0),
    Case("module_beside_not_imported", "denied", "return __import__('neigh' + 'bour').x"),
    Case(
        "folder_by_descriptor",
        "denied",
        "d = os.open('/etc', os.O_PATH); return os.open('passwd', os.O_RDONLY, dir_fd=d)",
    ),
    Case("folder_by_going_there", "denied", "os.chdir('/etc'); return open('passwd').read() and 1.0"),
    Case("environment", "ok", "return float(truth['word'] in str(os.environ))", score=0.0),
    Case(
        "environment_in_c",
        "ok",
        "g = ctypes.CDLL(None).getenv; g.restype = ctypes.c_char_p; return float(g(b'TOOLWISE_TEST_SECRET') is not None)",
        score=0.0,
    ),
    Case("proc_own_environment", "denied", "return open('/proc/self/environ').read() and 1.0"),
    Case("proc_of_the_parent", "denied", "return open(f'/proc/{os.getppid()}/environ').read() and 1.0"),
    Case("proc_command_line", "denied", "return open(f'/proc/{os.getppid()}/cmdline').read() and 1.0"),
    Case("memory_of_the_parent", "denied", "return open(f'/proc/{os.getppid()}/mem', 'rb').read(1) and 1.0"),
    Case("descriptors_of_the_parent", "denied", "return len(os.listdir(f'/proc/{os.getppid()}/fd'))"),
    Case("own_memory", "denied", "open('/proc/self/mem', 'r+b'); return 1.0"),
    Case("passwords", "denied", "return open('/etc/shadow').read() and 1.0"),
    Case("users", "denied", "return open('/etc/passwd').read() and 1.0"),
    Case("dev_shm", "denied", "open('/dev/shm/toolwise-test', 'w').write('x'); return 1.0"),
    Case(
        "shared_memory",
        "denied",
        "from multiprocessing import shared_memory\nshared_memory.SharedMemory('toolwise-test', True, 10); return 1.0",
    ),
    Case("terminal", "denied exception", "open('/dev/tty', 'w').write('x'); return 1.0"),
    Case("out_of_its_folder", "denied", "os.chdir('/tmp'); open('toolwise-test', 'w').write('x'); return 1.0"),
    Case("remove_own_folder", "denied exception", "os.rmdir(os.getcwd()); return 1.0"),
    Case("other_workers_folders", "denied", "return len(os.listdir(os.path.dirname(os.getcwd())))"),
    Case(
        "left_descriptors",
        "ok",
        "return float(sum(1 for fd in range(3, 64) if _open(fd)))",
        "def _open(fd):\n    try: os.fstat(fd); return fd not in (channel(),)\n    except OSError: return False",
        score=1.0,
    ),
    Case("shadowed_modules", "ok", "import json as j\nreturn float('neighbour' in (j.__file__ or ''))", score=0.0),
    Case(
        "shadow_in_its_folder",
        "ok",
        "open('this_is_new.py', 'w').write('x = 1')\ntry:\n    import this_is_new\nexcept ImportError: return 0.0\nreturn 1.0",
        score=0.0,
    ),
    Case("memory_file", "denied", "os.memfd_create('x'); return 1.0"),
    Case("device", "denied", "os.mknod('x', 0o60600, os.makedev(7, 0)); return 1.0"),
]
NETWORK = [
    Case("tcp", "denied", "socket.create_connection(('127.0.0.1', truth['tcp'])); return 1.0"),
    Case("tcp6", "denied", "socket.socket(socket.AF_INET6); return 1.0"),
    Case(
        "udp",
        "denied",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', truth['tcp'])); return 1.0",
    ),
    Case("unix_socket", "denied", "socket.socket(socket.AF_UNIX).connect(truth['unix']); return 1.0"),
    Case("abstract_socket", "denied", "socket.socket(socket.AF_UNIX).connect('\\0' + truth['abstract']); return 1.0"),
    Case("datagram_pair", "denied", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); return 1.0"),
    Case("netlink", "denied", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); return 1.0"),
    Case("dns", "denied", "socket.getaddrinfo('example.com', 80); return 1.0"),
    Case(
        "url",
        "denied",
        "import urllib.request\nurllib.request.urlopen(f'http://127.0.0.1:{truth[\"tcp\"]}/', timeout=0.3); return 1.0",
    ),
    Case("io_uring", "denied", "system(425, 4, None); return 1.0"),
    Case(
        "asyncio_works",
        "ok",
        "async def g(): await asyncio.sleep(0.01); return 1.0\nreturn asyncio.run(g())",
        score=1.0,
    ),
]
PROCESSES = [
    Case("exit_at_once", "died", "os._exit(0)"),
    Case("exit_politely", "died", "sys.exit(0)"),
    Case("exit_on_import", "died", module="sys.exit(0)"),
    Case("exit_at_once_on_import", "died", module="import os; os._exit(0)"),
    Case("abort", "died", "os.abort()"),
    Case("segmentation_fault", "died", "ctypes.string_at(0)"),
    Case("kills_itself", "died", "os.kill(os.getpid(), signal.SIGKILL); time.sleep(1)"),
    Case("raises_a_signal", "died", "signal.raise_signal(signal.SIGTERM); time.sleep(1)"),
    Case("signals_the_parent", "denied", "os.kill(os.getppid(), signal.SIGURG); return 1.0"),
    Case("signals_everyone", "denied", "os.kill(-1, 0); return 1.0"),
    Case("signals_its_group", "denied", "os.killpg(0, 0); return 1.0"),
    Case(
        "signal_through_a_descriptor",
        "denied",
        "r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid()); return 1.0",
    ),
    Case("lease", "denied", "fcntl.fcntl(os.open(__file__, os.O_RDONLY), 1024, fcntl.F_RDLCK); return 1.0"),
    Case("signal_through_a_pidfd", "denied", "os.pidfd_open(os.getppid()); return 1.0"),
    Case(
        "ptrace", "denied", "system({'x86_64': 101}.get(os.uname().machine, 117), 16, os.getppid(), 0, 0); return 1.0"
    ),
    Case(
        "reads_the_parents_memory",
        "denied",
        "system({'x86_64': 310}.get(os.uname().machine, 270), os.getppid(), None, 0, None, 0, 0); return 1.0",
    ),
    Case("subprocess", "denied", "subprocess.run(['/bin/true']); return 1.0"),
    Case("shell", "ok", "return float(os.system('true') == 0)", score=0.0),
    Case("exec", "denied", "os.execv('/bin/true', ['true'])"),
    Case("spawn", "denied", "os.posix_spawn('/bin/true', ['true'], {}); return 1.0"),
    Case(
        "double_forked_daemon",
        "denied",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\nreturn 1.0",
    ),
    Case(
        "multiprocessing",
        "denied",
        "import multiprocessing as m\nm.get_context('fork').Process(target=print).start(); return 1.0",
    ),
    Case("new_session", "denied", "os.setsid(); return 1.0"),
    Case("priority", "denied", "os.setpriority(os.PRIO_PROCESS, 0, 5); return 1.0"),
    Case("affinity", "denied", "os.sched_setaffinity(0, {0}); return 1.0"),
    Case("affinity_of_the_parent", "denied", "os.sched_setaffinity(os.getppid(), {0}); return 1.0"),
    Case("scheduler", "denied", "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); return 1.0"),
    Case("clock", "denied", "time.clock_settime(time.CLOCK_REALTIME, -1.0); return 1.0"),
    Case("identity", "denied", "os.setuid(os.getuid()); return 1.0"),
    Case("chroot", "denied", "os.chroot('.'); return 1.0"),
    Case("namespace", "denied", "system({'x86_64': 272}.get(os.uname().machine, 97), 0x10000000); return 1.0"),
    Case(
        "mount", "denied", "system({'x86_64': 165}.get(os.uname().machine, 40), None, None, None, 0, None); return 1.0"
    ),
    Case("bpf", "denied", "system({'x86_64': 321}.get(os.uname().machine, 280), 0, None, 0); return 1.0"),
    Case(
        "calls_of_another_processor",
        "denied died",
        """
        if os.uname().machine != 'x86_64': raise PermissionError(errno.EPERM, 'no such calls here')
        code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20; int 0x80; ret
        return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
        """,
    ),
    Case(
        "calls_of_x32",
        "denied",
        "if os.uname().machine != 'x86_64': raise PermissionError(errno.EPERM, 'no')\nreturn system(0x40000000 + 39)",
    ),
    Case("more_memory_by_decree", "denied exception", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); return 1.0"),
    Case("limits_of_the_parent", "denied", "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE); return 1.0"),
    Case(
        "survives_the_trainer",
        "denied",
        "if ctypes.CDLL(None, use_errno=True).prctl(1, 0, 0, 0, 0): raise OSError(ctypes.get_errno(), 'prctl')\nreturn 1.0",
    ),
]
LEFTOVERS = [
    Case("late_timer", "ok", "threading.Timer(0.2, os._exit, (1,)).start(); return 1.0", score=1.0, replaced=True),
    Case(
        "thread_left_behind",
        "ok",
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); return 1.0",
        score=1.0,
        replaced=True,
    ),
    Case(
        "thread_in_c_left_behind",
        "ok",
        "import _thread; _thread.start_new_thread(time.sleep, (60,)); time.sleep(0.02); return 1.0",
        score=1.0,
        replaced=True,
    ),
    Case(
        "thread_that_ended",
        "ok",
        "t = threading.Thread(target=time.sleep, args=(0.01,)); t.start(); t.join(); return 1.0",
        score=1.0,
        replaced=False,
    ),
    Case("late_alarm", "ok", "signal.setitimer(signal.ITIMER_REAL, 0.1); return 1.0", score=1.0, replaced=False),
    Case(
        "late_handler",
        "ok",
        "signal.signal(signal.SIGALRM, lambda *a: os._exit(1)); signal.setitimer(signal.ITIMER_REAL, 0.1); return 1.0",
        score=1.0,
        replaced=True,
    ),
    Case("at_exit", "ok", "import atexit; atexit.register(time.sleep, 60); return 1.0", score=1.0),
    Case("patched_math", "ok", "math.sqrt = lambda x: 0.0; return 1.0", score=1.0, replaced=True),
    Case(
        "patched_builtins",
        "ok exception bad_type died timeout",
        "builtins.len = lambda x: 0; builtins.isinstance = lambda *a: True; return 1.0",
        replaced=True,
    ),
    Case(
        "patched_json", "ok", "json.dumps = json.loads = lambda *a, **k: 'forged'; return 1.0", score=1.0, replaced=True
    ),
    Case(
        "patched_json_encoder",
        "ok",
        "json.JSONEncoder.encode = lambda *a: 'forged'; return 1.0",
        score=1.0,
        replaced=True,
    ),
    Case("patched_message", "ok", "type(messages[0]).to_openai = None; return 1.0", score=1.0, replaced=True),
    Case(
        "patched_harness",
        "ok bad_type exception died",
        "import toolwise.sandbox.harness as h\nh.read_result = lambda v: 1/0; return 1.0",
        replaced=True,
    ),
    Case(
        "patched_write",
        "ok",
        "os.write = None; os.read = None; os.getpid = lambda: 1; return 1.0",
        score=1.0,
        replaced=True,
    ),
    Case("patched_time", "ok", "time.monotonic = time.time = lambda: 0.0; return 1.0", score=1.0, replaced=True),
    Case("changed_environment", "ok", "os.environ['X'] = '1'; return 1.0", score=1.0, replaced=True),
    Case("changed_folder", "ok", "os.mkdir('d'); os.chdir('d'); return 1.0", score=1.0, replaced=True),
    Case("changed_stdout", "ok", "sys.stdout = None; return 1.0", score=1.0, replaced=True),
    Case("traced", "ok", "sys.settrace(lambda *a: None); return 1.0", score=1.0, replaced=True),
    Case(
        "files_left_behind",
        "ok",
        "n = len(os.listdir('.')); open('x', 'w').close(); return float(n)",
        score=0.0,
        replaced=False,
    ),
    Case("forged_header", "too_big", "os.write(channel(), struct.pack('!I', 2 ** 32 - 1)); time.sleep(60)"),
    Case("forged_garbage", "bad_type", "os.write(channel(), struct.pack('!I', 4) + b'\\xff{[('); time.sleep(60)"),
    Case("forged_list", "bad_type", "os.write(channel(), struct.pack('!I', 2) + b'[]'); time.sleep(60)"),
    Case(
        "forged_answer",
        "bad_type",
        'p = b\'{"id": "1", "at": 0, "answers": [{"result": "{\\\\"score\\\\": 9}"}]}\'\nos.write(channel(), struct.pack(\'!I\', len(p)) + p); time.sleep(60)',
    ),
    Case(
        "deep_forged_frame",
        "bad_type",
        "p = b'[' * 100000\nos.write(channel(), struct.pack('!I', len(p)) + p); time.sleep(60)",
    ),
    Case("torn_frame", "died", "os.write(channel(), struct.pack('!I', 1000) + b'{'); os._exit(0)"),
    Case("torn_frame_and_silence", "timeout", "os.write(channel(), b'\\0'); time.sleep(60)"),
    Case("closes_everything", "died", "os.closerange(3, 64); return 1.0"),
    Case("reads_the_channel", "timeout", "os.read(channel(), 100)"),
]
RESULTS = [
    Case("nan", "non_finite", "return float('nan')"),
    Case("infinity", "non_finite", "return float('-inf')"),
    Case("too_large", "non_finite", "return 10 ** 400"),
    Case("nan_in_a_dict", "non_finite", "return {'score': float('nan')}"),
    Case(
        "nan_in_a_step",
        "ok",
        "return EvaluateResult(score=1.0, step_outputs=[StepOutput(step_index=0, base_reward=float('nan'))])",
        score=1.0,
    ),
    Case(
        "nan_in_a_step_without_a_score",
        "non_finite",
        "return EvaluateResult(step_outputs=[StepOutput(step_index=0, base_reward=float('nan'))])",
    ),
    Case("none", "bad_type", "return None"),
    Case("boolean", "ok", "return True", score=1.0),
    Case("text", "bad_type", "return '1.0'"),
    Case("complex", "bad_type", "return 1j"),
    Case("function", "bad_type", "return lambda: 1"),
    Case("module", "bad_type", "return os"),
    Case("bytes", "bad_type", "return b'1'"),
    Case("no_score", "bad_type", "return EvaluateResult()"),
    Case("wrong_keys", "bad_type", "return {'score': 'high'}"),
    Case(
        "cyclic",
        "bad_type exception",
        "d = {}; d['d'] = d\nreturn EvaluateResult(score=1.0, step_outputs=[StepOutput(step_index=0, base_reward=1.0, metrics=d)])",
    ),
    Case(
        "object_in_metrics",
        "bad_type",
        "return EvaluateResult(score=1.0, step_outputs=[StepOutput(step_index=0, base_reward=1.0, metrics={'o': object()})])",
    ),
    Case(
        "lying_float",
        "non_finite",
        "return L(0.5)",
        "class L(float):\n    def __float__(self): return float('nan')\n    def __eq__(self, o): return True",
    ),
    Case(
        "lying_class",
        "bad_type exception",
        "return L()",
        "class L:\n    @property\n    def __class__(self): return EvaluateResult",
    ),
    Case(
        "lying_result",
        "ok",
        "return L(score=0.5)",
        "class L(EvaluateResult):\n    def model_dump_json(self, *a, **k): return '{\"score\": 99}'",
        score=0.5,
    ),
    Case(
        "result_forced",
        "non_finite bad_type",
        "r = EvaluateResult(score=1.0); r.__dict__['score'] = float('nan'); return r",
    ),
    Case("result_of_text", "bad_type", "r = EvaluateResult(score=1.0); r.__dict__['score'] = 'x'; return r"),
    Case(
        "own_error",
        "exception",
        "from toolwise.types import EvaluationFault\nreturn EvaluateResult(score=1.0, error=EvaluationFault(kind='mine', message='m'))",
    ),
    Case("plain_exception", "exception", "return 1 / 0"),
    Case(
        "unprintable_exception",
        "exception",
        "raise E()",
        "class E(Exception):\n    def __str__(self): raise ValueError\n    __repr__ = __str__",
    ),
    Case("surrogate_exception", "exception", "raise ValueError('\\ud800 \\udfff')"),
    Case("surrogate_reason", "bad_type exception ok", "return {'score': 1.0, 'reason': '\\ud800'}"),
    Case("base_exception", "exception", "raise BaseException('x')"),
    Case("keyboard_interrupt", "exception", "raise KeyboardInterrupt"),
    Case("generator_exit", "exception", "raise GeneratorExit"),
    Case("exception_group", "exception", "raise ExceptionGroup('g', [ValueError('a')] * 3)"),
    Case("cyclic_exception", "exception", "e = ValueError(); e.__cause__ = e; raise e"),
    Case("import_error", "import", module="import no_such_module_at_all"),
    Case("syntax_error", "import", module="def ("),
    Case("error_on_import", "import", module="1 / 0"),
    Case("denied_on_import", "denied", module="open('/etc/passwd')"),
]
CASES = [*LOOPS, *BOMBS, *FILES, *NETWORK, *PROCESSES, *LEFTOVERS, *RESULTS, *FILE_CASES]
WHERE_PRIVILEGES_MATTER = [*[*FILES, *NETWORK, *PROCESSES][::3], *FILE_CASES[4::16]]
"""Where privileges matter most: a sample for the usual run. The long one runs all cases as another user."""
BY_NAME = {case.name: case for case in CASES}
__all__ = ["RACES"]


_numbers = itertools.count(1)
FILE_MB, SLACK_MB = 32, 8
"""What a case may have on disk; and what else the kernel may count as its own meanwhile."""
MEASURED_MB = 160
"""What one may have where its folder is measured: it writes at full speed until it is looked at."""


class Meter(threading.Thread):
    """The most that is on disk at once: in the workers' own file systems, or in the one that holds their folders."""

    def __init__(self, sandbox: Any, own_disk: bool) -> None:
        super().__init__(daemon=True)
        self._pool, self._done, self._own_disk = sandbox._pool, threading.Event(), own_disk
        self._before = 0
        self._before = self._outside()
        self.peak = 0.0

    def _outside(self) -> int:
        """Where workers have their own disks, nothing but they may hold anything: others write to this one meanwhile."""
        if self._own_disk:
            root = self._pool.scratch_root.path
            files = root.rglob("*") if root is not None else ()
            return sum(path.lstat().st_blocks * 512 for path in files if path.is_file())
        found = os.statvfs(self._pool.scratch_root.path or "/tmp")
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def _inside(self) -> int:
        used = 0
        for worker in list(self._pool._busy):
            disk = getattr(worker, "_disk", None)
            with suppress(OSError, IndexError):
                if disk is not None and disk.limited:
                    found = os.fstatvfs(disk.folders[0])
                    used += (found.f_blocks - found.f_bfree) * found.f_frsize
        return used

    def run(self) -> None:
        while not self._done.wait(0.002):
            with suppress(OSError):  # what is removed while it is looked at
                self.peak = max(self.peak, self._inside() + self._outside() - self._before)

    def stop(self) -> float:
        self._done.set()
        self.join()
        return self.peak / 2**20


class Ground:
    """The world that the cases attack: secrets beside the reward, servers that must hear nothing.

    `own_disk` false: as on a machine where workers cannot have file systems of their own.
    """

    def __init__(self, folder: Path, tier: Any = "standard", *, own_disk: bool = True) -> None:
        from toolwise.sandbox import Sandbox

        self.folder = folder
        os.environ["TOOLWISE_TEST_SECRET"] = SECRET
        (folder / "secret.txt").write_text(SECRET)
        (folder / "neighbour.py").write_text("x = 1")
        (folder / "json.py").write_text("raise RuntimeError('neighbour')")
        (folder / "victim" / "folder").mkdir(parents=True)
        (folder / "victim" / "folder" / "file").write_text(SECRET)
        (folder / "victim" / "closed").write_text(SECRET)
        (folder / "victim" / "closed").chmod(0o400)
        (folder / "victim" / "folder" / "file").chmod(0o400)
        (folder / "victim" / "folder").chmod(0o500)
        (folder / "harmless.py").write_text("def f(messages, truth):\n    return 0.25\n")
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "s"))
        self.abstract = socket.socket(socket.AF_UNIX)
        name = f"toolwise-test-{os.getpid()}-{next(_numbers)}"
        self.abstract.bind(f"\0{name}")
        for server in (self.unix, self.abstract):
            server.listen()
        self.truth = {
            "folder": str(folder),
            "secret": str(folder / "secret.txt"),
            "word": SECRET,
            "victim": str(folder / "victim"),
            "tcp": self.tcp.getsockname()[1],
            "unix": str(folder / "s"),
            "abstract": name,
        }
        self.sandbox = Sandbox(tier, timeout_s=TIMEOUT_S, memory_mb=128, file_mb=FILE_MB, workers=2)
        self.own_disk = own_disk and getattr(self.sandbox.report(), "own_disk", False)
        if not own_disk:
            self.sandbox._pool._plan = replace(self.sandbox._pool._plan, own_disk=False)
        self.before = self.state()

    def state(self) -> Any:
        return sorted(
            (p.name, p.stat().st_mode, p.read_text() if p.is_file() else "")
            for p in self.folder.rglob("*")
            if (p.is_file() or p.is_dir()) and "case" not in p.name
        )

    def visitors(self) -> list[str]:
        servers = {"tcp": self.tcp, "unix": self.unix, "abstract": self.abstract}
        heard = select.select(list(servers.values()), [], [], 0)[0]
        return [f"a visitor at {name}" for name, server in servers.items() if server in heard]

    def close(self) -> None:
        self.sandbox.close()
        for server in (self.tcp, self.unix, self.abstract):
            server.close()

    def wait_for_spare(self) -> None:
        """So that what is timed is the call and not the start of an interpreter."""
        spare = self.sandbox._pool._spare
        if spare is not None:
            select.select([spare.channel], [], [], 20)

    def run(self, case: Case) -> Outcome:
        """Once; or twice, where the first time was slow: this machine may have had other things to do."""
        with nullcontext() if self.own_disk else alone_on_the_disk():
            outcome = self._run(case)
            late = outcome.seconds > TIMEOUT_S + GRACE_S or outcome.disk_mb > outcome.disk_limit_mb
            return self._run(case) if late else outcome

    def _run(self, case: Case) -> Outcome:
        path = self.folder / f"case_{case.name}.py"
        path.write_text(case.source(), encoding="utf-8")
        self.wait_for_spare()
        threads = threading.active_count()
        meter = Meter(self.sandbox, self.own_disk)
        meter.start()
        began = time.monotonic()
        result = self.sandbox.evaluate(f"{path}:f", MESSAGES, self.truth)
        seconds = time.monotonic() - began
        disk_mb = meter.stop()
        self.wait_for_sweepers()
        kept = bool(self.sandbox._pool._idle.get(f"{path.resolve()}:f"))
        left = self.left_behind() + self.visitors()
        if self.state() != self.before:
            left.append("changed files")
        if threading.active_count() > threads:
            left.append("threads in the parent")
        next_score = self.sandbox.evaluate(f"{self.folder / 'harmless.py'}:f", MESSAGES, None).score
        fault = result.error
        return Outcome(
            fault.kind if fault else "ok",
            fault.message if fault else "",
            result.score,
            seconds,
            not kept,
            left,
            next_score,
            disk_mb,
            FILE_MB + SLACK_MB if self.own_disk else MEASURED_MB,
        )

    def wait_for_sweepers(self) -> None:
        """A folder nested thousands deep, or closed to its owner, is removed beside; that must end too."""
        for thread in threading.enumerate():
            if thread.name == "toolwise-sandbox-sweep":
                thread.join(20)

    def left_behind(self) -> list[str]:
        """Processes of our sandbox that it does not know of, and folders of workers that are gone."""
        pool = self.sandbox._pool
        root, known = str(pool.scratch_root.path), set(self.sandbox.pids())
        spare = pool._spare.popen.pid if pool._spare is not None else -1
        found = processes_with(f"HOME={root}/")
        supervisors = {parent_of(pid) for pid in known}  # where workers may start processes
        left = [f"process {pid}" for pid in found if pid not in known | supervisors and parent_of(pid) != spare]
        if len(list(Path(root).iterdir())) > len(known) + 1:
            left.append("folders")
        return left


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def processes_with(word: str) -> list[int]:
    """Processes whose environment holds `word`."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if word.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


@contextmanager
def ground_in(folder: Path, tier: Any = "standard", *, own_disk: bool = True) -> Iterator[Ground]:
    ground = Ground(folder, tier, own_disk=own_disk)
    try:
        yield ground
    finally:
        ground.close()


def main() -> None:
    """`FOLDER [all|files TIER OWN_DISK]`."""
    which, *rest = [*sys.argv[2:], "privileges"]
    chosen = {"all": CASES, "files": FILE_CASES}.get(which, WHERE_PRIVILEGES_MATTER)
    tier, own_disk = (rest[0], rest[1] == "True") if which == "files" else ("standard", True)
    with ground_in(Path(sys.argv[1]), tier, own_disk=own_disk) as ground:
        for case in chosen:
            print(json.dumps({"name": case.name, "outcome": asdict(ground.run(case)), "uid": os.getuid()}), flush=True)


if __name__ == "__main__":
    main()
