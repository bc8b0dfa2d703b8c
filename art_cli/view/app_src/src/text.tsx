// Text that models and users wrote, shown so that it can do nothing: only ever as text nodes, what cannot be seen made
// visible, long text folded.

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";

// Characters that show nothing or turn the direction of what follows. Joiners are left between letters that need them.
const INVISIBLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u00a0\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
    "\\u200b\\u200e\\u200f\\u2028-\\u202f\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb\\u{e0000}-\\u{e0fff}]" +
    "|\\p{Surrogate}|(?<![\\p{Extended_Pictographic}\\p{Emoji_Modifier}\\ufe0f\\p{L}\\p{M}])[\\u200c\\u200d]" +
    "|(?<=[a-zA-Z])[\\u200c\\u200d]",
  "gu",
);

const NAMES: Record<number, string> = {
  0x00: "null", 0x07: "bell", 0x08: "backspace", 0x0d: "carriage return", 0x1b: "escape", 0x7f: "delete",
  0xa0: "no-break space", 0xad: "soft hyphen", 0x200b: "zero-width space", 0x200c: "zero-width non-joiner",
  0x200d: "zero-width joiner", 0x200e: "left-to-right mark", 0x200f: "right-to-left mark", 0x2028: "line separator",
  0x2029: "paragraph separator", 0x202a: "left-to-right embedding", 0x202b: "right-to-left embedding",
  0x202c: "end of direction", 0x202d: "left-to-right override", 0x202e: "right-to-left override",
  0x202f: "narrow no-break space", 0x2060: "word joiner", 0x2066: "left-to-right isolate",
  0x2067: "right-to-left isolate", 0x2068: "first-strong isolate", 0x2069: "end of isolate",
  0xfeff: "byte order mark",
};

function Invisible({ character }: { character: string }) {
  const point = character.codePointAt(0) ?? 0;
  const code = `U+${point.toString(16).toUpperCase().padStart(4, "0")}`;
  const name = NAMES[point] ?? (point >= 0xd800 && point <= 0xdfff ? "half a surrogate pair" : "invisible character");
  return (
    <span class="invisible" title={`${code}, ${name}`}>
      {code}
    </span>
  );
}

/** The parts of a text: strings, and the characters in it that would not be seen. */
export function visible(text: string): ComponentChildren[] {
  const parts: ComponentChildren[] = [];
  let from = 0;
  for (const found of text.matchAll(INVISIBLE)) {
    if (found[0] === "\r" && text[found.index + 1] === "\n") continue;
    if (found.index > from) parts.push(text.slice(from, found.index));
    parts.push(<Invisible key={found.index} character={found[0]} />);
    from = found.index + found[0].length;
  }
  if (from < text.length) parts.push(text.slice(from));
  return parts;
}

/** A short text inside a line: whatever it holds, it stays one line and moves nothing beside it. */
export function Label({ text, max = 300 }: { text: string; max?: number }) {
  const line = text.length > max ? `${text.slice(0, max)}\u2026` : text;
  return <bdi class="label">{visible(line.replace(/\s+/g, " "))}</bdi>;
}

/** `text` with each place where `find` stands marked. */
export function marked(text: string, find: string): ComponentChildren[] {
  if (find === "") return visible(text);
  const parts: ComponentChildren[] = [];
  const low = text.toLowerCase();
  const wanted = find.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0 && low.length === text.length; at = low.indexOf(wanted, from)) {
    parts.push(...visible(text.slice(from, at)));
    parts.push(<mark key={`mark${at}`}>{visible(text.slice(at, at + find.length))}</mark>);
    from = at + find.length;
  }
  parts.push(...visible(text.slice(from)));
  return parts;
}

const FOLD = 6000; // characters that are shown at first

/** A text of any length. `find` is marked, and what is folded away is opened where it stands. */
export function LongText({ text, find = "", fold = FOLD }: { text: string; find?: string; fold?: number }) {
  const [shown, setShown] = useState(fold);
  useEffect(() => setShown(fold), [text]);
  const place = find ? text.toLowerCase().indexOf(find.toLowerCase()) : -1;
  const length = Math.max(shown, place < 0 ? 0 : place + 500);
  const isFolded = text.length > length * 1.1;
  const body = useMemo(() => marked(isFolded ? text.slice(0, length) : text, find), [text, isFolded, length, find]);
  return (
    <>
      <div class="text" dir="auto">
        {body}
        {isFolded && <span aria-hidden="true">{"\u2026"}</span>}
      </div>
      {isFolded && <Folded rest={text.length - length} step={length * 4} whole={text} onMore={setShown} />}
    </>
  );
}

interface FoldedProps {
  rest: number;
  step: number;
  whole: string;
  onMore: (shown: number) => void;
}

function Folded({ rest, step, whole, onMore }: FoldedProps) {
  return (
    <div class="folded">
      <span>{rest.toLocaleString("en-US")} more characters</span>
      <button type="button" class="quiet" onClick={() => onMore(step)}>
        show more
      </button>
      {whole.length <= 400_000 && (
        <button type="button" class="quiet" onClick={() => onMore(whole.length)}>
          show all
        </button>
      )}
      <CopyButton text={whole} />
    </div>
  );
}

export function CopyButton({ text, label = "copy" }: { text: string; label?: string }) {
  const [said, setSaid] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setSaid("copied");
    } catch {
      setSaid("could not copy");
    }
    window.setTimeout(() => setSaid(""), 1500);
  };
  return (
    <button type="button" class="quiet" onClick={() => void copy()}>
      {said || label}
    </button>
  );
}

/** A message's content as text: parts of other kinds are named and not shown. */
export function contentText(content: unknown): string {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map(partText).join("\n");
  return JSON.stringify(content, null, 2);
}

function partText(part: unknown): string {
  if (typeof part === "string") return part;
  if (part !== null && typeof part === "object") {
    const { text, type } = part as { text?: unknown; type?: unknown };
    if (typeof text === "string") return text;
    if (typeof type === "string" && type !== "text") return `[${type}]`;
  }
  return JSON.stringify(part, null, 2);
}

/** Arguments of a tool call: pretty JSON where they are JSON, else as the model wrote them. */
export function argumentsText(value: unknown): string {
  if (typeof value !== "string") return value === undefined ? "" : JSON.stringify(value, null, 2);
  if (value.length > 100_000) return value;
  try {
    return JSON.stringify(JSON.parse(value), null, 2);
  } catch {
    return value;
  }
}
