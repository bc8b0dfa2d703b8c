"""The order desk as an MCP server over standard input and output: `python3 server.py`.

Each attempt starts one. With the standard library alone it is there in a moment; a server of the `mcp` package's
MCPServer is shorter, and takes a second.
"""

import json
import sys
from typing import Any

from desk import TOOLS, Desk

INVALID_PARAMS, METHOD_NOT_FOUND = -32602, -32601  # JSON-RPC's codes
ABOUT = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "desk", "version": "1"}}


def listed() -> list[dict[str, Any]]:
    """The tools as MCP describes them."""
    return [
        {
            "name": name,
            "description": about,
            "inputSchema": {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]},
        }
        for name, (key, about, _) in TOOLS.items()
    ]


def answer(desk: Desk, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result, or the error, of one request."""
    if method == "initialize":
        return {"result": ABOUT}
    if method == "tools/list":
        return {"result": {"tools": listed()}}
    if method != "tools/call":
        return {"error": {"code": METHOD_NOT_FOUND, "message": method}}
    name, arguments = params.get("name"), params.get("arguments") or {}
    number = arguments.get(TOOLS[name][0]) if name in TOOLS else None
    if not isinstance(number, int) or not 0 <= number < 2**63:  # what SQLite can hold
        return {"error": {"code": INVALID_PARAMS, "message": f"{name} takes a whole number, {TOOLS.get(name, '?')[0]}"}}
    return {"result": {"content": [{"type": "text", "text": desk.call(name, number)}]}}


def main() -> None:
    desk = Desk()
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            reply = answer(desk, request["method"], request.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}), flush=True)


if __name__ == "__main__":
    main()
