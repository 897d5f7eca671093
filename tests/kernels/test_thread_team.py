"""Test that a team is only the caller where there is no OpenMP library."""

from __future__ import annotations

import ctypes

from foretoken_kernels.cpu import thread_team


def test_a_callback_is_run_by_the_caller_alone() -> None:
    seen: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    alone = thread_team._single_thread_function(thread_team._run_alone, thread_team._PARALLEL_TYPE)
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint32)(alone)
    run(address, 12345, 2, 0)
    assert seen == [12345]
