"""Ray's exceptions to ours, at the one border where they meet.

An error of ours that was raised in another process arrives inside RayTaskError: ``unwrap`` gives it back as it
was raised. A process that died without a word becomes ComponentLost, which the supervisor answers with a new
epoch. Everything else stays what it is: a defect must keep its traceback.
"""

from __future__ import annotations

import ray.exceptions

from xidstream.pipeline.errors import ComponentLost, XidstreamError

_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectStoreFullError,
    ray.exceptions.OutOfDiskError,
    ray.exceptions.RaySystemError,
    ray.exceptions.ActorUnschedulableError,
)


def unwrap(error: BaseException, part: str) -> BaseException:
    """What to raise instead of ``error``; ``part`` names the process that was called, for people."""
    cause = error
    # Ray raises a class made of RayTaskError and the cause's own: the cause itself is inside.
    while isinstance(cause, ray.exceptions.RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    if isinstance(cause, XidstreamError):
        return cause
    if isinstance(cause, _LOST):
        return ComponentLost(f"the {part} ended unexpectedly ({type(cause).__name__})")
    return error
