"""One exception class for each status code of the service and of the client library."""

from __future__ import annotations


class Error(Exception):
    """Base of all errors of kvstow.

    code: the status code's name, "NOT_FOUND".
    retry_after: seconds after which the call is worth another try, 0 where there is no hint.
    """

    code = "UNKNOWN"

    def __init__(self, message: str = "", retry_after: float = 0.0):
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self):
        return (type(self), (str(self), self.retry_after))


class CancelledError(Error):
    code = "CANCELLED"


class UnknownError(Error):
    code = "UNKNOWN"


class InvalidArgumentError(Error, ValueError):
    """The call is wrong as it stands: the message names the argument, what was found and what is
    wanted. Nothing was sent."""

    code = "INVALID_ARGUMENT"


class DeadlineExceededError(Error, TimeoutError):
    """No answer in time. Go on without the cache."""

    code = "DEADLINE_EXCEEDED"


class NotFoundError(Error, LookupError):
    code = "NOT_FOUND"


class AlreadyExistsError(Error):
    code = "ALREADY_EXISTS"


class PermissionDeniedError(Error):
    code = "PERMISSION_DENIED"


class ResourceExhaustedError(Error):
    """At a limit; `retry_after` says when to try again."""

    code = "RESOURCE_EXHAUSTED"


class FailedPreconditionError(Error):
    code = "FAILED_PRECONDITION"


class AbortedError(Error):
    code = "ABORTED"


class OutOfRangeError(Error):
    code = "OUT_OF_RANGE"


class UnimplementedError(Error):
    code = "UNIMPLEMENTED"


class InternalError(Error):
    code = "INTERNAL"


class UnavailableError(Error):
    """No service answers, or the client's breaker is open and no call was made."""

    code = "UNAVAILABLE"


class DataLossError(Error):
    """Bytes came that are not what was sealed; none of them reached the caller's memory."""

    code = "DATA_LOSS"


class UnauthenticatedError(Error):
    code = "UNAUTHENTICATED"


_BY_CODE = {
    cls.code: cls
    for cls in (
        CancelledError,
        UnknownError,
        InvalidArgumentError,
        DeadlineExceededError,
        NotFoundError,
        AlreadyExistsError,
        PermissionDeniedError,
        ResourceExhaustedError,
        FailedPreconditionError,
        AbortedError,
        OutOfRangeError,
        UnimplementedError,
        InternalError,
        UnavailableError,
        DataLossError,
        UnauthenticatedError,
    )
}


def from_status(code: str, message: str, retry_after: float = 0.0) -> Error:
    """The exception for a status. Called by the extension module too."""
    return _BY_CODE.get(code, UnknownError)(message, retry_after)
