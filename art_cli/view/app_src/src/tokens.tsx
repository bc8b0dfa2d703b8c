// The tokens of a turn: which of them the model sampled and how they were trained, each with its numbers.

import { useMemo, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import type { Segment, SegmentKind, Turn } from "./contract";
import { mean, number, signed } from "./numbers";
import { LongText, visible } from "./text";

export type Shading = "none" | "logprob" | "advantage" | "gap";

export const SHADINGS: { name: Shading; says: string; about: string }[] = [
  { name: "none", says: "plain", about: "messages as they read" },
  { name: "logprob", says: "logprob", about: "how unlikely each sampled token was" },
  { name: "advantage", says: "advantage", about: "which tokens the update made likelier or less likely" },
  { name: "gap", says: "gap", about: "learner's logprob minus the engine's" },
];

/** The largest sizes in a trajectory: the ends of the scales. */
export interface Ranges {
  advantage: number;
  gap: number;
}

export function rangesOf(turns: Turn[]): Ranges {
  const ranges = { advantage: 0, gap: 0 };
  for (const segment of turns.flatMap((turn) => turn.segments)) {
    for (const value of segment.advantages ?? []) ranges.advantage = Math.max(ranges.advantage, Math.abs(value ?? 0));
    for (const place of segment.ids.keys()) ranges.gap = Math.max(ranges.gap, Math.abs(gapAt(segment, place) ?? 0));
  }
  return ranges;
}

export function hasShading(turns: Turn[], shading: Shading): boolean {
  const sampled = turns.flatMap((turn) => turn.segments).filter((segment) => segment.kind === "sampled");
  if (shading === "logprob") return sampled.some((segment) => segment.logprobs !== null);
  if (shading === "advantage") return sampled.some((segment) => segment.advantages !== null);
  if (shading === "gap") return sampled.some((segment) => segment.learner_logprobs !== null);
  return true;
}

function gapAt(segment: Segment, place: number): number | null {
  const [learner, engine] = [segment.learner_logprobs?.[place], segment.logprobs?.[place]];
  return learner === null || learner === undefined || engine === null || engine === undefined ? null : learner - engine;
}

const UNLIKELY = 4; // nats at which the shading of a logprob is full
const GAP_FLOOR = 1e-4; // gaps below this are rounding, and are not blown up to full tones

interface Shade {
  class: string;
  strength: number;
}

function shadeOf(segment: Segment, place: number, shading: Shading, ranges: Ranges): Shade | null {
  if (shading === "logprob") {
    const value = segment.logprobs?.[place];
    if (value === null || value === undefined) return null;
    return { class: value < -2.3 ? "tok is-unlikely" : "tok", strength: Math.min(1, -value / UNLIKELY) };
  }
  const value = shading === "advantage" ? segment.advantages?.[place] : gapAt(segment, place);
  if (value === null || value === undefined || shading === "none") return null;
  const most = Math.max(ranges[shading], shading === "gap" ? GAP_FLOOR : 1e-9);
  const sign = value > 0 ? " is-up" : value < 0 ? " is-down" : "";
  return { class: `tok${Math.abs(value) / most > 0.02 ? sign : ""}`, strength: Math.abs(value) / most };
}

const TOKENS = 1500; // tokens of a segment that are shown at first

interface SegmentProps {
  segment: Segment;
  turn: Turn;
  shading: Shading;
  ranges: Ranges;
  find?: string;
}

export function SegmentTokens({ segment, turn, shading, ranges }: SegmentProps) {
  const [shown, setShown] = useState(TOKENS);
  const tokens = segment.tokens ?? [];
  const spans = useMemo(
    () => tokens.slice(0, shown).map((token, place) => <Token key={place} {...{ token, segment, place, shading, ranges }} />),
    [segment, shading, shown, ranges],
  );
  const [tip, setTip] = useState<Tip | null>(null);
  if (segment.tokens === null) {
    return (
      <div class={`segment is-${segment.kind}`}>
        <LongText text={segment.text || `${segment.num_tokens.toLocaleString("en-US")} tokens, without their text`} />
      </div>
    );
  }
  const show = (event: MouseEvent) => {
    const element = (event.target as HTMLElement).closest<HTMLElement>("[data-at]");
    setTip(element === null ? null : tipAt(element));
  };
  return (
    <div class={`segment is-${segment.kind}`}>
      <div class="tokens" dir="auto" onMouseOver={show} onClick={show} onMouseLeave={() => setTip(null)}>
        {spans}
      </div>
      {tokens.length > shown && (
        <div class="folded">
          <span>{(tokens.length - shown).toLocaleString("en-US")} more tokens</span>
          <button type="button" class="quiet" onClick={() => setShown(shown * 4)}>
            show more
          </button>
        </div>
      )}
      {tip !== null && <TokenTip tip={tip} segment={segment} turn={turn} />}
    </div>
  );
}

interface TokenProps {
  token: string;
  segment: Segment;
  place: number;
  shading: Shading;
  ranges: Ranges;
}

const SPECIAL = /^<\|?[\w./:\u2581\uff5c|-]+\|?>$/; // tokens like <|im_end|>

function Token({ token, segment, place, shading, ranges }: TokenProps) {
  const shade = segment.kind === "sampled" ? shadeOf(segment, place, shading, ranges) : null;
  const special = SPECIAL.test(token) ? " is-special" : "";
  return (
    <span data-at={place} class={`${shade?.class ?? "tok"}${special}`} style={shade && shade.strength > 0.01 ? { "--shade": `${Math.round(100 * shade.strength)}%` } : undefined}>
      {tokenText(token)}
    </span>
  );
}

/** A token's text; where it is only white space, its sign. */
function tokenText(token: string): ComponentChildren {
  if (/^\n+$/.test(token)) return <><span class="space">{"\u23ce".repeat(token.length)}</span>{token}</>;
  if (token === "") return <span class="space">{"\u2205"}</span>;
  return visible(token);
}

// --- numbers of one token -----------------------------------------------------------------------------------------------

interface Tip {
  place: number;
  left: number;
  top?: number;
  bottom?: number;
}

const TIP = { width: 236, height: 200 }; // its size in px, as the style sheet has it, and about

/** Below the token, or above it where there is no room below. */
function tipAt(element: HTMLElement): Tip {
  const box = element.getClientRects()[0] ?? element.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, window.innerWidth - TIP.width - 14));
  const isLow = box.bottom + TIP.height > window.innerHeight && box.top > TIP.height;
  return { place: Number(element.dataset.at), left, ...(isLow ? { bottom: window.innerHeight - box.top + 6 } : { top: box.bottom + 6 }) };
}

function pixels(value: number | undefined): string {
  return value === undefined ? "auto" : `${value}px`;
}

const KINDS: Record<SegmentKind, string> = {
  sampled: "sampled",
  context: "kept from earlier turns",
  message: "message of the prompt",
  tool: "tool result",
  template: "chat template",
};

function TokenTip({ tip, segment, turn }: { tip: Tip; segment: Segment; turn: Turn }) {
  const { place } = tip;
  const logprob = segment.logprobs?.[place];
  return (
    <div popover="manual" ref={(element) => element?.showPopover()} class="tip" style={{ left: `${tip.left}px`, top: pixels(tip.top), bottom: pixels(tip.bottom) }}>
      <p class="tip-token">
        <bdi>{visible(JSON.stringify(segment.tokens?.[place] ?? "").slice(1, -1).slice(0, 60))}</bdi>
      </p>
      <dl class="pairs">
        <Pair name="token id" value={String(segment.ids[place] ?? "\u2013")} />
        <Pair name="is" value={segment.kind === "sampled" ? `sampled by step ${turn.step}` : KINDS[segment.kind]} />
        {segment.kind === "sampled" && (
          <>
            <Pair name="logprob" value={number(logprob)} />
            <Pair name="probability" value={logprob === null || logprob === undefined ? "\u2013" : `${(100 * Math.exp(logprob)).toPrecision(3)} %`} />
            {segment.learner_logprobs !== null && <Pair name="learner's" value={number(segment.learner_logprobs[place])} />}
            {segment.learner_logprobs !== null && <Pair name="gap" value={signed(gapAt(segment, place))} />}
            {segment.advantages !== null && <Pair name="advantage" value={signed(segment.advantages[place])} />}
          </>
        )}
      </dl>
    </div>
  );
}

function Pair({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd class="num">{value}</dd>
    </div>
  );
}

const TABLE = 400; // rows of the table of numbers

/** The numbers of a turn's sampled tokens as a table, for keyboard and screen reader. */
export function TokenTable({ turn }: { turn: Turn }) {
  const [isOpen, setOpen] = useState(false);
  const sampled = turn.segments.filter((segment) => segment.kind === "sampled");
  const total = sampled.reduce((sum, segment) => sum + segment.num_tokens, 0);
  if (total === 0) return null;
  const rows = isOpen ? sampled.flatMap((segment) => [...segment.ids.keys()].map((place) => ({ segment, place }))).slice(0, TABLE) : [];
  const hasLearner = sampled.some((segment) => segment.learner_logprobs !== null);
  const hasAdvantage = sampled.some((segment) => segment.advantages !== null);
  return (
    <details class="numbers" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary class="num">{turnFacts(turn).join(" \u00b7 ")}</summary>
      {isOpen && (
        <table>
          <thead>
            <tr>
              <th scope="col">token</th>
              <th scope="col" class="num">id</th>
              <th scope="col" class="num">logprob</th>
              {hasLearner && <th scope="col" class="num">learner's</th>}
              {hasLearner && <th scope="col" class="num">gap</th>}
              {hasAdvantage && <th scope="col" class="num">advantage</th>}
            </tr>
          </thead>
          <tbody>
            {rows.map(({ segment, place }, row) => (
              <tr key={row}>
                <td>
                  <code>{visible(JSON.stringify(segment.tokens?.[place] ?? "").slice(1, -1))}</code>
                </td>
                <td class="num">{segment.ids[place]}</td>
                <td class="num">{number(segment.logprobs?.[place])}</td>
                {hasLearner && <td class="num">{number(segment.learner_logprobs?.[place])}</td>}
                {hasLearner && <td class="num">{signed(gapAt(segment, place))}</td>}
                {hasAdvantage && <td class="num">{signed(segment.advantages?.[place])}</td>}
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {total > TABLE && isOpen && <p class="soft small">The first {TABLE} of {total.toLocaleString("en-US")} tokens.</p>}
    </details>
  );
}

/** One line about a turn: who sampled it, how many tokens, how likely, how it was trained. */
export function turnFacts(turn: Turn): string[] {
  const sampled = turn.segments.filter((segment) => segment.kind === "sampled");
  const tokens = sampled.reduce((sum, segment) => sum + segment.num_tokens, 0);
  const logprob = mean(sampled.flatMap((segment) => segment.logprobs ?? []));
  const advantages = sampled.flatMap((segment) => segment.advantages ?? []);
  const facts = [`sampled by step ${turn.step}`, `${tokens.toLocaleString("en-US")} tokens`];
  if (logprob !== null) facts.push(`mean logprob ${number(logprob)}`);
  if (advantages.length > 0) facts.push(`advantage ${signed(mean(advantages))}`);
  if (turn.temperature !== null && turn.temperature !== 1) facts.push(`temperature ${number(turn.temperature)}`);
  if (turn.finish_reason !== "stop" && turn.finish_reason !== "tool_calls") facts.push(`ended by ${turn.finish_reason}`);
  if (turn.is_abandoned) facts.push("abandoned: the client asked again");
  return facts;
}

// --- the legend ---------------------------------------------------------------------------------------------------------

export function ShadingLegend({ shading, ranges }: { shading: Shading; ranges: Ranges }) {
  if (shading === "none") return null;
  if (shading === "logprob") {
    return (
      <p class="shading-legend small">
        <span>certain</span>
        <span class="ramp is-logprob" aria-hidden="true" />
        <span>
          {"\u2264"} {"\u2212"}
          {UNLIKELY} nats
        </span>
        <span class="soft">
          <span class="tok is-unlikely">underlined</span> below 10 %
        </span>
      </p>
    );
  }
  const most = shading === "gap" ? Math.max(ranges.gap, GAP_FLOOR) : ranges.advantage;
  return (
    <p class="shading-legend small">
      <span class="num">{number(-most)}</span>
      <span class="ramp is-signed" aria-hidden="true" />
      <span class="num">+{number(most)}</span>
      <span class="soft">
        <span class="tok is-up">line</span> up, <span class="tok is-down">dashes</span> down
      </span>
    </p>
  );
}
