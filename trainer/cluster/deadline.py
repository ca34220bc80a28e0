"""Deadlines for questions to Ray, and for its end: Ray waits without end for a control process that hangs."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rollout.processes.keeper import descendants
from rollout.processes.process_marks import kill_processes, mark_processes

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

RAY_ANSWER_S = 60.0
"""Deadline in seconds for an answer of Ray about its nodes and resources, which takes milliseconds."""
ANSWER_THREAD = "parity-ray-answer"


class RayAnswerError(RuntimeError):
    """Ray did not answer in time."""


def ray_answer(question: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Result of `question(*arguments)`, a function of Ray that starts no process. Raises RayAnswerError.

    The call has a thread of its own, because nothing can end a call that waits in C; after the deadline nobody waits
    for it. A process that is started there would end with the thread, because Ray's processes end with their parent.
    """
    result: Future[ResultT] = Future()

    def ask() -> None:
        try:
            result.set_result(question(*arguments))
        except Exception as error:  # the caller raises it
            result.set_exception(error)

    threading.Thread(target=ask, name=ANSWER_THREAD, daemon=True).start()
    try:
        return result.result(RAY_ANSWER_S)
    except TimeoutError as error:
        if result.done():  # the question itself ended with this error
            raise
        raise RayAnswerError(
            f"phase placement: Ray did not answer {question.__name__} within {RAY_ANSWER_S:.0f} s: its control process "
            "(gcs_server) hangs. Start the run again, on a cluster (cluster.address) after restarting Ray"
        ) from error


def is_call_unanswered() -> bool:
    """Whether a call of `ray_answer` still waits in C, though nobody waits for it: the interpreter's exit may crash."""
    return any(thread.name == ANSWER_THREAD for thread in threading.enumerate())


def end_ray() -> None:
    """Leave Ray, and end the processes of Ray that this process started; a warning if Ray does not answer."""
    import ray  # here, because the command `parity` imports this file before it knows that it needs Ray

    try:
        ray_answer(ray.shutdown)
    except RayAnswerError as error:
        logger.warning("%s. The processes of Ray that this process started are killed", error)
        atexit.unregister(ray.shutdown)  # it would wait for the same answer again
        node: Any = ray._private.worker._global_node  # type: ignore[attr-defined]
        for kind in () if node is None else node.all_processes.values():
            for started in kind:
                kill_processes(mark_processes([started.process.pid, *descendants(started.process.pid)]))
