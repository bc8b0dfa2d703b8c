"""ChatError: a refused or failed request with its HTTP status. A wire (wires/) renders it for the client.

ChatError is not an ArtError, because it goes to the client and never to the command line. Messages never contain a key.
`type`, `param`, and `code` are OpenAI's fields.
"""

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
MAX_MESSAGE = 4096  # maximum characters of a message, which may quote clients or endpoints


class ChatError(Exception):
    """One refused or failed request.

    Example: ChatError(404, "the model 'mine' does not exist", param="model", code="model_not_found")
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        *,
        retry_after: str | None = None,  # value of the Retry-After header
    ) -> None:
        message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or (SERVER_ERROR if status >= 500 else INVALID_REQUEST)
        self.param = param
        self.code = code
        self.retry_after = retry_after


def invalid(message: str, param: str | None = None, code: str | None = None) -> ChatError:
    """Returns a ChatError with status 400: the client's mistake."""
    return ChatError(400, message, INVALID_REQUEST, param, code)
