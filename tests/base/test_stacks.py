"""The stacks of other threads, while they run."""

import gc
import subprocess
import sys
import threading

import pytest

from trainwright.base.stacks import all_stacks, stack_of


def test_the_frames_of_a_thread_that_waits() -> None:
    started, end = threading.Event(), threading.Event()

    def outer() -> None:
        inner()

    def inner() -> None:
        started.set()
        end.wait()

    thread = threading.Thread(target=outer, name="waits")
    thread.start()
    try:
        assert started.wait(60)
        assert thread.ident is not None
        stack = stack_of(thread.ident)
        assert dict(all_stacks())["waits"] == stack
        assert gc.isenabled()
    finally:
        end.set()
        thread.join()
    names = [line.rpartition(" in ")[2] for line in stack]
    assert names.index("inner") + 1 == names.index("outer")
    assert f'File "{__file__}", line ' in stack[names.index("inner")]
    assert stack_of(thread.ident) == []


def test_the_main_thread_is_read_from_another_one() -> None:
    program = """
import threading
from trainwright.base.stacks import stack_of

def work():
    reader = threading.Thread(target=lambda: print(stack_of(threading.main_thread().ident)[-2:]))
    reader.start(); reader.join()  # one line: the thread may read before join is called

work()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == repr(['File "<string>", line 7 in work', 'File "<string>", line 9 in <module>'])


def test_the_innermost_frames_of_a_deep_stack() -> None:
    def call(depth: int) -> list[str]:
        return call(depth - 1) if depth else stack_of(threading.get_ident())

    stack = call(150)
    assert len(stack) == 100
    assert stack[-1].endswith(" in call")


# In C, a thread that calls Python is added to the threads of Python, and removed when the call returns.
CALLS_FROM_C = """
import ctypes, sys, threading, time
from trainwright.base.stacks import stack_of

C, CALL, number = ctypes.CDLL(None), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p), ctypes.c_ulong
call, end, looks = CALL(lambda _: None), time.monotonic() + 4, 0

def start_threads():
    thread = number()
    while time.monotonic() < end:
        C.pthread_create(ctypes.byref(thread), None, call, None)
        C.pthread_join(thread, None)

def numbers(depth):
    if depth:
        yield from numbers(depth - 1)
    yield depth

def work():
    while time.monotonic() < end:
        sum(numbers(20))

def look():
    global looks
    while time.monotonic() < end:
        assert stack_of(main)
        looks += 1

main = threading.get_ident()
threads = [threading.Thread(target=target) for target in (start_threads, start_threads, start_threads, look)]
[thread.start() for thread in threads]
work()
[thread.join() for thread in threads]
print(looks)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pthreads")
def test_threads_of_c_code_may_come_and_go_meanwhile() -> None:
    done = subprocess.run([sys.executable, "-c", CALLS_FROM_C], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)  # faulthandler ended it by a segmentation fault
    assert int(done.stdout) > 1000
