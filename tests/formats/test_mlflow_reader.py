"""MLflow's own translation of OpenTelemetry's conventions understands our spans: kinds, inputs, outputs, tokens."""

from pathlib import Path

from tests.support.others.real_readers import MARKS, answer

pytestmark = MARKS

PROGRAM = """
import json
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message
from mlflow.entities.span import Span
from mlflow.tracing.otel.translation import translate_span_when_storing
from art_cli.formats.traces.otlp import fill
from art_cli.formats.traces.spans import TracedRun, spans_of
from tests.support.records.attempts import scored
seen = []
for span in spans_of(scored(), TracedRun("mail", "id", "qwen")):
    message = Message()
    fill(message, span)
    found = translate_span_when_storing(Span.from_otel_proto(message))["attributes"]
    names = ("spanType", "spanInputs", "spanOutputs", "chat.tokenUsage", "llm.model")
    seen.append({name: json.loads(found.get(f"mlflow.{name}") or "null") for name in names})
print(json.dumps(seen))
"""


def test_mlflow_reads_turns_tools_and_tokens(tmp_path: Path) -> None:
    agent, first, tool, second, _ = answer("-c", PROGRAM, home=tmp_path)
    assert [each["spanType"] for each in (agent, first, tool, second)] == ["AGENT", "CHAT_MODEL", "TOOL", "CHAT_MODEL"]
    assert first["chat.tokenUsage"] == {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8}
    assert first["llm.model"] == "qwen" and agent["chat.tokenUsage"]["total_tokens"] == 22
    assert [each["role"] for each in second["spanInputs"]] == ["system", "user", "assistant", "tool"]
    assert second["spanOutputs"][0]["parts"] == [{"type": "text", "content": "It was Ann."}]
    assert tool["spanInputs"] == {"query": "cheese"} and tool["spanOutputs"] == "1 mail of Ann"
