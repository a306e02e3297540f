"""What a worker's dump says of the place where it is. Real workers that hang: test_tried_workers."""

from __future__ import annotations

import os

from fastloop.feeds.workers.whereabouts import Whereabouts, describe

LOOP = '  File "/torch/utils/data/_utils/worker.py", line 349 in _worker_loop\n'
THREAD = 'Thread 0x01 (most recent call first):\n  File "/python/threading.py", line 1 in wait\n\n'
HEAD = "Current thread 0x02 (most recent call first):\n"


def test_the_line_and_the_getitem_above_it() -> None:
    frames = '  File "/u/io.py", line 9 in read\n  File "/u/data set.py", line 7 in __getitem__\n'
    torch_own = '  File "/x/torch/utils/data/dataset.py", line 5 in __getitem__\n'
    expected = "__getitem__ at /u/data set.py:7, which is at /u/io.py:9 in read"
    assert describe(f"{THREAD}{HEAD}{frames}{torch_own}{LOOP}") == expected
    assert describe(f"{HEAD}{frames}{torch_own}{LOOP}\n{THREAD}") == expected


def test_a_getitem_that_hangs_itself_and_a_collate_function() -> None:
    assert describe(f'{HEAD}  File "/u/d.py", line 7 in __getitem__\n{LOOP}') == "__getitem__ at /u/d.py:7"
    assert describe(f'{HEAD}  File "/u/d.py", line 3 in collate\n{LOOP}') == "collate at /u/d.py:3"


def test_a_dump_without_the_loading_thread_says_nothing() -> None:
    assert describe(THREAD) is None and describe("") is None


def test_who_has_not_said_that_it_can_be_asked_is_not() -> None:
    """The signal would end it: this very process, say."""
    assert Whereabouts().find(os.getpid()) is None
