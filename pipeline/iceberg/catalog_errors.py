"""What the errors of a catalog's driver mean for a run: SQLAlchemy's, those of pyiceberg's REST client, and botocore's.

- The catalog *does not answer*, has too much to do, or is out of order: StorageFault, after which a run tries again.
  Glue's client has tried some times by itself by then.
- It *lets nobody in* with these credentials, or there are none: PreconditionMissing. To repeat that cannot help, and a
  run that waited would hold the server's WAL. A token that has run out is here, too: where tokens are renewed by
  themselves, the driver has done so before.
- A REST catalog *takes a request for invalid*: SinkFailed. One known reason is a server that wants field ids in files.
- All else (a limit of an account, an input that Glue takes for wrong) is left as it is, and stops the run.

Whether a commit has been made is no question of this module: after each of these errors a run reads the watermarks.

Errors are known by the names of their classes, because no driver is imported that is not used. botocore has one class
for what a service refuses, and the service's own word for it in the answer. No message of a driver is repeated,
because it may have an address with a password, or who asked.

``answering`` goes around each request to a catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from xidstream.pipeline.errors import PreconditionMissing, SinkFailed, StorageFault, XidstreamError

_DOWN: Final = frozenset(
    {
        "ChunkedEncodingError",
        "CommitStateUnknownException",
        "ConnectTimeout",
        "ConnectionError",
        "CredentialRetrievalError",
        "HTTPClientError",
        "InterfaceError",
        "OperationalError",
        "ReadTimeout",
        "ServerError",
        "ServiceUnavailableError",
        "TooManyRequestsError",
    }
)
"""Classes, or their bases. The ConnectionErrors of requests and of botocore are not Python's. CredentialRetrievalError:
the service that gives a machine its role's credentials is away."""
_NOT_LET_IN: Final = frozenset(
    {
        "AuthorizationExpiredError",
        "ForbiddenError",
        "LoginError",
        "NoAuthTokenError",
        "NoCredentialsError",
        "OAuthError",
        "PartialCredentialsError",
        "SSOError",
        "TokenRetrievalError",
        "UnauthorizedError",
    }
)
_INVALID: Final = frozenset({"BadRequestError", "RESTError"})
"""These classes themselves: others of REST are made from them."""
_BUSY_CODES: Final = frozenset(
    {
        "FederationSourceRetryableException",
        "InternalServiceException",
        "OperationTimeoutException",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestTimeout",
        "RequestTimeoutException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
"""A service's words in botocore's ClientError. What else answers by a status of 500 or more is busy, too."""
_DENIED_CODES: Final = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "OptInRequired",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)


@contextmanager
def answering(what: str) -> Iterator[None]:
    """Raise StorageFault, PreconditionMissing or SinkFailed, as the module says, for what the catalog of ``what`` did.
    Other errors pass."""
    try:
        yield
    except Exception as error:
        ours = _fault_of(what, error)
        if ours is None:
            raise
        raise ours from error


def _fault_of(what: str, error: Exception) -> XidstreamError | None:
    if isinstance(error, XidstreamError):
        return None
    names = {each.__name__ for each in type(error).__mro__}
    if names & _DOWN or isinstance(error, ConnectionError):
        return StorageFault(f"the catalog of {what} does not answer ({type(error).__name__})")
    if names & _NOT_LET_IN:
        return _denied(what, type(error).__name__)
    if type(error).__name__ in _INVALID:
        return SinkFailed(
            f"the catalog of {what} takes a request for invalid ({type(error).__name__})",
            remedy="the catalog's own log says why; a server that takes no files without field ids cannot be used "
            "(docs/iceberg.md)",
        )
    if "ClientError" in names:
        answer: dict[str, Any] = getattr(error, "response", {})
        code = str(answer.get("Error", {}).get("Code", ""))
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _BUSY_CODES or status >= 500:
            return StorageFault(f"the catalog of {what} does not answer ({code})")
        if code in _DENIED_CODES:
            return _denied(what, f"{code} for {getattr(error, 'operation_name', 'a request')}")
    return None


def _denied(what: str, why: str) -> PreconditionMissing:
    return PreconditionMissing(
        f"the catalog of {what} does not let this run in ({why})",
        remedy="check the credentials that pyiceberg finds where the Spark driver runs, when they run out, and whether "
        "they may do this: a run reads, makes and changes the namespace and its tables (docs/iceberg.md)",
    )
