"""The stack of another thread, while it runs."""

import subprocess
import sys
import threading

from trainwright.stacks import stack_of


def test_the_frames_of_a_thread_that_waits() -> None:
    started, end = threading.Event(), threading.Event()

    def outer() -> None:
        inner()

    def inner() -> None:
        started.set()
        end.wait()

    thread = threading.Thread(target=outer)
    thread.start()
    try:
        assert started.wait(60)
        assert thread.ident is not None
        stack = stack_of(thread.ident)
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
from trainwright.stacks import stack_of

def work():
    reader = threading.Thread(target=lambda: print(stack_of(threading.main_thread().ident)[-2:]))
    reader.start(); reader.join()  # one line: the thread may read before join is called

work()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == repr(['File "<string>", line 7 in work', 'File "<string>", line 9 in <module>'])
