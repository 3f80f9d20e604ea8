"""Turns Ray's exceptions into ours, in one place.

If another process raises an error of ours, it arrives inside RayTaskError. ``unwrap`` returns it as it was raised. A
process that died becomes ComponentLost, and the supervisor then begins a new epoch. Every other exception stays as it
is: a defect must keep its traceback.
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
    ray.exceptions.RpcError,
)


def unwrap(error: BaseException, part: str) -> BaseException:
    """The error to raise in place of ``error``. ``part`` names the process that was called, for people."""
    cause = error
    # Ray raises a class that derives from RayTaskError and from the cause's class. The cause itself is inside.
    while isinstance(cause, ray.exceptions.RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    if isinstance(cause, XidstreamError):
        return cause
    if isinstance(cause, _LOST):
        return ComponentLost(f"the {part} ended unexpectedly ({type(cause).__name__})")
    return error
