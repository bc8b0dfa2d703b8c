"""Keeps web pages out of a server without a key. Any page that a user opens can make the browser call this machine.

A page can send a `text/plain` POST to any address without permission. It can also give its own host name the address
127.0.0.1 (DNS rebinding), and the browser then takes this server for the page's own. Browsers reveal both in headers
that a page cannot change. Programs (curl, the OpenAI clients) send none of these headers.
"""

import re
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers

from art_cli.chat.api_keys import is_loopback
from art_cli.chat.chat_errors import ChatError

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::(\d{0,5}))?")
OWN_SITES = ("same-origin", "none")  # "none" means that the user typed the address
CURE = "start the server with a key (ART_API_KEY) to reach it this way"


def check_sender(
    method: str,
    headers: Headers,
    kinds: Sequence[str] = ("application/json",),
    is_own: Callable[[str, str], bool] = lambda name, port: is_loopback(name),
) -> None:
    """Raises ChatError: 421 for a foreign host name, 403 for another site's page, 415 for a POST that is no JSON.

    `kinds` are the content types of a POST that are accepted. A page needs permission to send any of them. `is_own`
    returns whether the name and the port ("" if none is given) of a Host header are this server's.

    A request without a Host header is accepted, because browsers always send one and old health checks do not.
    """
    hosts = headers.getlist("host")
    if not all((parts := HOST.fullmatch(host)) and is_own(_bare(parts[1]), parts[2] or "") for host in hosts):
        message = f"the Host header names another machine; this server is localhost, 127.0.0.1 or [::1]; {CURE}"
        raise ChatError(421, message, code="foreign_host")
    if any(origin not in [f"http://{host}" for host in hosts] for origin in headers.getlist("origin")):
        raise ChatError(403, f"a web page of another origin may not ask here; {CURE}", code="foreign_origin")
    if any(site not in OWN_SITES for site in headers.getlist("sec-fetch-site")):
        raise ChatError(403, f"a web page of another site may not ask here; {CURE}", code="foreign_origin")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind not in kinds:
        message = "a request is JSON and says so: send the header Content-Type: application/json"
        raise ChatError(415, message, code="unsupported_media_type")


def _bare(name: str) -> str:
    return name.strip("[]").lower()
