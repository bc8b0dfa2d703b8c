// Pieces of a conversation that several views show: roles, tool calls, JSON.

import { useState } from "preact/hooks";
import type { ToolCall } from "./contract";
import { argumentsText, CopyButton, Label, LongText } from "./text";

const ROLES: Record<string, string> = { system: "system", developer: "developer", user: "user", assistant: "assistant", tool: "tool", function: "tool" };

/** A role's name as a class: roles that no protocol has look like the user's. */
export function roleClass(role: string): string {
  return `role-${ROLES[role] ?? "user"}`;
}

export function callName(call: ToolCall): string {
  return String(call.function?.name ?? call.name ?? "?");
}

export function callArguments(call: ToolCall): string {
  return argumentsText(call.function?.arguments ?? call.arguments);
}

const CALLS = 20; // tool calls that are shown at first

export function Calls({ calls, find = "" }: { calls: ToolCall[]; find?: string }) {
  const [shown, setShown] = useState(CALLS);
  if (!Array.isArray(calls) || calls.length === 0) return null;
  return (
    <div class="calls">
      {calls.slice(0, shown).map((call, place) => (
        <Call key={place} call={call} find={find} />
      ))}
      {calls.length > shown && (
        <div class="folded">
          <span>{(calls.length - shown).toLocaleString("en-US")} more tool calls</span>
          <button type="button" class="quiet" onClick={() => setShown(shown * 4)}>
            show more
          </button>
        </div>
      )}
    </div>
  );
}

function Call({ call, find }: { call: ToolCall; find: string }) {
  if (call === null || typeof call !== "object") return null;
  const text = callArguments(call);
  const isShort = text.length < 80 || !text.includes("\n");
  return (
    <div class="call">
      <span class="call-name">
        <span aria-hidden="true">{"\u2192"} </span>
        <span class="unseen">calls </span>
        <Label text={callName(call)} max={100} />
      </span>
      <div class="call-arguments">
        <LongText text={isShort ? text.replace(/\s*\n\s*/g, " ") : text} find={find} fold={2000} />
      </div>
    </div>
  );
}

/** A value as JSON that opens on demand. */
export function JsonDetails({ title, value, isOpen = false }: { title: string; value: unknown; isOpen?: boolean }) {
  const [open, setOpen] = useState(isOpen);
  const text = open ? (JSON.stringify(value, null, 2) ?? "") : "";
  return (
    <details open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{title}</summary>
      {open && (
        <div class="json">
          <LongText text={text} fold={4000} />
          <CopyButton text={text} />
        </div>
      )}
    </details>
  );
}
