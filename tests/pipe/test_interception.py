"""Who answers the call of a module that can be intercepted, and until when."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pipe.interception import intercepting, offered


def test_without_a_handler_a_call_is_left_to_the_module() -> None:
    assert offered(object(), []) is None


def test_a_handler_is_in_force_inside_its_context_in_its_thread_and_gives_way_to_an_inner_one() -> None:
    def outer(module: Any, micro_batches: Sequence[Any]) -> list[Any]:
        return ["outer", *micro_batches]

    def inner(module: Any, micro_batches: Sequence[Any]) -> None:
        return None

    elsewhere: list[Any] = []
    with intercepting(outer):
        assert offered(None, [1]) == ["outer", 1]
        with intercepting(inner):
            assert offered(None, [1]) is None
        assert offered(None, [2]) == ["outer", 2]
        thread = threading.Thread(target=lambda: elsewhere.append(offered(None, [3])))
        thread.start()
        thread.join()
    assert elsewhere == [None]
    assert offered(None, [4]) is None


def test_a_handler_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), intercepting(lambda module, micro_batches: ["answer"]):
        raise KeyError
    assert offered(None, []) is None
