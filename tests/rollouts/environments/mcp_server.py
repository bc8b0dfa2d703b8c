"""An MCP server over stdin and stdout. It needs only the standard library, so it starts quickly.

Its tools add numbers, count their calls, fail, and stop the server.
"""

import json
import os
import sys
from typing import Any

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [
    {"name": "add", "description": "The sum of two numbers.", "inputSchema": NUMBERS},
    *({"name": name, "inputSchema": {"type": "object"}} for name in ("count", "fail", "end")),
]
INVALID_PARAMS, METHOD_NOT_FOUND = -32602, -32601
num_counted = 0


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    global num_counted
    if name == "end":
        os._exit(3)
    if name == "fail":
        return {"content": [{"type": "text", "text": "it is broken"}], "isError": True}
    num_counted += name == "count"
    said = num_counted if name == "count" else arguments["a"] + arguments["b"]
    return {
        "content": [{"type": "text", "text": str(said)}, {"type": "image", "data": "AA==", "mimeType": "image/png"}]
    }


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result, or the error, of one request."""
    if method == "initialize":
        about = {"name": "sums", "version": "1"}
        return {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": about}}
    if method == "tools/list":  # in pages of two
        first = int(params.get("cursor") or 0)
        more = {"nextCursor": str(first + 2)} if first + 2 < len(TOOLS) else {}
        return {"result": {"tools": TOOLS[first : first + 2], **more}}
    if method == "tools/call":
        try:
            return {"result": call(params["name"], params.get("arguments") or {})}
        except (KeyError, TypeError) as error:
            return {"error": {"code": INVALID_PARAMS, "message": f"add: {error}"}}
    return {"error": {"code": METHOD_NOT_FOUND, "message": method}}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        reply = {"jsonrpc": "2.0", "id": request["id"], **answer(request["method"], request.get("params") or {})}
        print(json.dumps(reply), flush=True)
