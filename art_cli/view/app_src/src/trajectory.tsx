// One attempt as a conversation: messages, tool calls, and each sampled token with its numbers.

import type { TargetedKeyboardEvent } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Group, Message, Segment, Sources, TrajectoryAnswer, TrajectoryRecord, Turn } from "./contract";
import { Chat } from "./chat";
import { useAnswer, useAnswers } from "./data";
import { Drawing } from "./drawing";
import { MetricsList, Scores } from "./facts";
import { scenarioTitle, stepName } from "./group";
import { useKeys } from "./keys";
import { useChoice } from "./memory";
import { callArguments, callName, Calls, JsonDetails, roleClass } from "./message";
import { count, number, reward as rewardText, seconds } from "./numbers";
import { RewardChip, scaleOf } from "./rewards";
import { useRoving } from "./roving";
import { go, link, type Route } from "./route";
import { Heading, Waiting } from "./shell";
import { contentText, CopyButton, Label, LongText } from "./text";
import { hasShading, rangesOf, SegmentTokens, SHADINGS, ShadingLegend, TokenTable, type Ranges, type Shading } from "./tokens";
import { VirtualList, type ListHandle } from "./virtual";

type TrajectoryRoute = Extract<Route, { page: "trajectory" }>;

interface ViewProps {
  sources: Sources;
  route: TrajectoryRoute;
  query: URLSearchParams;
}

export function TrajectoryView({ sources, route }: ViewProps) {
  const { value, error } = useAnswer<TrajectoryAnswer>(urlOf(route.source, route.id));
  if (value === undefined) return <Waiting error={error} what="the attempt" />;
  return <Attempt answer={value} sources={sources} route={route} />;
}

function urlOf(source: string, id: string): string {
  return `/api/source/${encodeURIComponent(source)}/trajectory/${encodeURIComponent(id)}`;
}

interface AttemptProps {
  answer: TrajectoryAnswer;
  sources: Sources;
  route: TrajectoryRoute;
}

/** One row of the conversation. */
interface Item {
  key: string;
  role: string;
  message: Message | null; // null: a turn's tokens that belong to no message shown
  turn: Turn | null;
  place: number | null; // place in the trajectory's messages
  text: string; // what the search looks through
  branch?: number;
}

function Attempt({ answer, sources, route }: AttemptProps) {
  const { trajectory, turns } = answer;
  const [wanted, setShading] = useChoice<Shading>("shading", "logprob");
  const [hasPrompts, setPrompts] = useState(false);
  const [find, setFind] = useState("");
  const [chatFrom, setChatFrom] = useState<number | null>(null);
  const list = useRef<ListHandle>(null);
  const shading = hasShading(turns, wanted) ? wanted : hasShading(turns, "logprob") && wanted !== "none" ? "logprob" : "none";
  const ranges = useMemo(() => rangesOf(turns), [turns]);
  const items = useMemo(() => (hasPrompts ? turnItems(turns) : messageItems(trajectory, turns)), [answer, hasPrompts]);
  const found = useMemo(() => (find === "" ? [] : matches(items, find)), [items, find]);
  const rows = useRoving(items.length, list, (index) => document.querySelector<HTMLElement>(`[data-item="${index}"]`));
  const { here } = rows;
  const nextMatch = (by: number, text: string) => {
    const found = text === "" ? [] : matches(items, text);
    const next = by > 0 ? (found.find((index) => index > here) ?? found[0]) : (found.findLast((index) => index < here) ?? found.at(-1));
    if (next !== undefined) rows.go(next);
  };
  const beside = [answer.previous, answer.next].filter((id) => id !== null);
  useAnswers<TrajectoryAnswer>(beside.map((id) => urlOf(route.source, id))); // so that they open at once
  const open = (id: string | null) => id !== null && go(link.trajectory(route.source, id));
  const up = () => go(link.group(route.source, answer.step, answer.split, answer.group_id));
  useKeys([
    { keys: ["j"], says: "next message", run: () => rows.move(1) },
    { keys: ["k"], says: "previous message", run: () => rows.move(-1) },
    { keys: ["ArrowLeft"], says: "previous attempt", run: () => open(answer.previous) || false },
    { keys: ["ArrowRight"], says: "next attempt", run: () => open(answer.next) || false },
    { keys: ["u"], says: "up to the group", run: up },
    { keys: ["Escape"], says: "end the search, or up to the group", run: () => (find === "" ? up() : setFind("")) },
    { keys: ["n"], says: "next place found", run: () => nextMatch(1, find) },
    { keys: ["N", "Shift+N"], says: "previous place found", run: () => nextMatch(-1, find) },
    { keys: ["s"], says: "shade by the next number", run: () => setShading(nextShading(shading, turns)) },
    { keys: ["t"], says: "messages, or every token", run: () => setPrompts(!hasPrompts) },
  ]);
  return (
    <div class="page">
      <Head answer={answer} sources={sources} route={route} />
      <div class="with-facts">
        <section class="conversation" aria-label="Conversation">
          <div class="tools">
            <div class="segmented" role="group" aria-label="What is shown">
              <button type="button" aria-pressed={!hasPrompts} onClick={() => setPrompts(false)}>
                messages
              </button>
              <button type="button" aria-pressed={hasPrompts} disabled={turns.length === 0} onClick={() => setPrompts(true)}>
                every token
              </button>
            </div>
            <div class="segmented" role="group" aria-label="Shade sampled tokens by">
              {SHADINGS.map((each) => (
                <button key={each.name} type="button" title={each.about} aria-pressed={shading === each.name} disabled={!hasShading(turns, each.name)} onClick={() => setShading(each.name)}>
                  {each.says}
                </button>
              ))}
            </div>
            <Find find={find} onFind={setFind} found={found} here={here} onNext={nextMatch} />
            <ShadingLegend shading={shading} ranges={ranges} />
          </div>
          {!answer.has_tokens && turns.length > 0 && <p class="soft small">No tokenizer was found beside this file, so tokens are not told apart.</p>}
          {items.length === 0 && <p class="waiting">No model call was recorded.</p>}
          <VirtualList
            role="list"
            itemRole="listitem"
            count={items.length}
            estimate={120}
            overscan={8}
            handle={list}
            itemKey={(index) => items[index]?.key ?? index}
            item={(index) => {
              const item = items[index];
              return (
                item && (
                  <Row
                    item={item}
                    index={index}
                    isCurrent={index === here}
                    shading={shading}
                    ranges={ranges}
                    find={find}
                    hasTokens={answer.has_tokens}
                    onFocus={() => rows.enter(index)}
                    onChat={sources.chat && item.place !== null && item.branch === undefined ? () => setChatFrom(item.place) : null}
                  />
                )
              );
            }}
          />
        </section>
        <aside class="facts-side" aria-label="Facts of this attempt">
          {chatFrom !== null && <Chat key={chatFrom} messages={trajectory.messages.slice(0, chatFrom + 1)} onClose={() => setChatFrom(null)} />}
          <Drawing source={route.source} trajectory={trajectory} message={items[here]?.place ?? null} />
          <Facts answer={answer} source={route.source} />
        </aside>
      </div>
    </div>
  );
}

function nextShading(shading: Shading, turns: Turn[]): Shading {
  const able = SHADINGS.map((each) => each.name).filter((name) => hasShading(turns, name));
  return able[(able.indexOf(shading) + 1) % able.length] ?? "none";
}

// --- what the rows are --------------------------------------------------------------------------------------------------

function messageItems(trajectory: TrajectoryRecord, turns: Turn[]): Item[] {
  const main = trajectory.messages;
  const owners = turnOfMessage(main, turns, 0);
  const items = main.map((message, place): Item => item(message, place, owners[place] ?? null, `m${place}`));
  for (const [branch, messages] of trajectory.branches.entries()) {
    items.push({ key: `b${branch}`, role: "branch", message: null, turn: null, place: null, text: "", branch });
    const owned = turnOfMessage(messages, turns, branch + 1);
    items.push(...messages.map((message, place): Item => ({ ...item(message, place, owned[place] ?? null, `b${branch}.${place}`), branch })));
  }
  return items;
}

function item(message: Message, place: number, turn: Turn | null, key: string): Item {
  const safe = message !== null && typeof message === "object" ? message : { role: "unknown", content: message as unknown };
  return { key, role: String(safe.role ?? "no role"), message: safe, turn, place, text: messageText(safe) };
}

function messageText(message: Message): string {
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  const parts = [reasoningOf(message), contentText(message.content), contentText(message.refusal)];
  return [...parts, ...calls.filter(Boolean).flatMap((call) => [callName(call), callArguments(call)])].join("\n");
}

function reasoningOf(message: Message): string {
  return contentText(message.reasoning_content ?? message.reasoning);
}

/** Which turn wrote each message of a conversation: as the server found, else one after the other where they are as many. */
function turnOfMessage(messages: Message[], turns: Turn[], conversation: number): (Turn | null)[] {
  const owners: (Turn | null)[] = messages.map(() => null);
  if (conversation === 0 && turns.every((turn) => turn.message === null)) {
    const replies = [...messages.keys()].filter((place) => messages[place]?.role === "assistant");
    const heard = turns.filter((turn) => !turn.is_abandoned);
    if (replies.length === heard.length) for (const [order, place] of replies.entries()) owners[place] = heard[order] ?? null;
    return owners;
  }
  for (const turn of turns) if (turn.conversation === conversation && turn.message !== null) owners[turn.message] = turn;
  return owners;
}

function turnItems(turns: Turn[]): Item[] {
  return turns.map((turn) => ({
    key: `t${turn.index}`,
    role: `turn ${turn.index}`,
    message: null,
    turn,
    place: turn.conversation === 0 ? turn.message : null,
    text: turn.segments.map((segment) => segment.text).join(""),
  }));
}

function matches(items: Item[], find: string): number[] {
  const wanted = find.toLowerCase();
  return [...items.keys()].filter((index) => items[index]?.text.toLowerCase().includes(wanted));
}

function Find({ find, onFind, found, here, onNext }: { find: string; onFind: (text: string) => void; found: number[]; here: number; onNext: (by: number, text: string) => void }) {
  const enter = (event: TargetedKeyboardEvent<HTMLInputElement>) => {
    if (event.key === "Enter") onNext(event.shiftKey ? -1 : 1, event.currentTarget.value); // state may lag behind it
  };
  const at = found.indexOf(here);
  return (
    <label class="search">
      <span class="unseen">Find in this attempt</span>
      <input type="search" placeholder="Find  /" value={find} onInput={(event) => onFind(event.currentTarget.value)} onKeyDown={enter} />
      <span class="soft small num" role="status">
        {find !== "" && (found.length === 0 ? "not found" : at >= 0 ? `${at + 1} of ${found.length}` : count(found.length, "message"))}
      </span>
    </label>
  );
}

// --- a row --------------------------------------------------------------------------------------------------------------

interface RowProps {
  item: Item;
  index: number;
  isCurrent: boolean;
  shading: Shading;
  ranges: Ranges;
  find: string;
  hasTokens: boolean;
  onFocus: () => void;
  onChat: (() => void) | null;
}

function Row(props: RowProps) {
  const { item, index, isCurrent, onFocus, onChat } = props;
  if (item.role === "branch") {
    return (
      <h2 class="branch" data-item={index} tabIndex={-1}>
        Branch {(item.branch ?? 0) + 1}: another conversation of this attempt
      </h2>
    );
  }
  const label = item.turn ? `${item.role}, turn ${item.turn.index}` : item.role;
  return (
    <article class={`message ${item.message ? roleClass(item.role) : "role-turn"}`} data-item={index} data-current={isCurrent || undefined} tabIndex={0} aria-label={label} onFocus={onFocus}>
      <div class="message-head">
        <span class="role">
          <Label text={item.role} max={40} />
        </span>
        {item.message?.name && <Label text={String(item.message.name)} max={60} />}
        <span class="push message-tools">
          {onChat && (
            <button type="button" class="quiet" onClick={onChat}>
              chat from here
            </button>
          )}
          {item.text.length > 40 && <CopyButton text={item.text} />}
        </span>
      </div>
      <div class="message-body">
        {item.message ? <MessageBody {...props} message={item.message} /> : item.turn && <TurnBody {...props} turn={item.turn} />}
      </div>
    </article>
  );
}

function MessageBody({ message, item, shading, ranges, find, hasTokens }: RowProps & { message: Message }) {
  const sampled = item.turn?.segments.filter((segment) => segment.kind === "sampled") ?? [];
  const hasShades = shading !== "none" && find === "" && hasTokens && sampled.some((segment) => segment.tokens !== null);
  const reasoning = reasoningOf(message);
  const content = contentText(message.content) + (message.refusal ? `\n${contentText(message.refusal)}` : "");
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  return (
    <>
      {hasShades && item.turn ? (
        <>
          {sampled.map((segment, place) => (
            <SegmentTokens key={place} segment={segment} turn={item.turn as Turn} shading={shading} ranges={ranges} />
          ))}
        </>
      ) : (
        <>
          {reasoning !== "" && (
            <div class="reasoning">
              <LongText text={reasoning} find={find} />
            </div>
          )}
          {content !== "" && <LongText text={content} find={find} />}
        </>
      )}
      <Calls calls={calls} find={find} />
      {item.turn && <TokenTable turn={item.turn} />}
      {content === "" && reasoning === "" && calls.length === 0 && !hasShades && <p class="faint">(empty)</p>}
    </>
  );
}

const SEGMENTS: Record<Segment["kind"], string> = {
  template: "template",
  context: "context",
  message: "message",
  tool: "tool",
  sampled: "sampled",
};

function TurnBody({ turn, shading, ranges }: RowProps & { turn: Turn }) {
  return (
    <>
      {turn.segments.map((segment, place) =>
        segment.kind === "context" ? (
          <Context key={place} segment={segment} turn={turn} ranges={ranges} />
        ) : (
          <div key={place} class="segment-row">
            <span class={`kind is-${segment.kind}`}>{SEGMENTS[segment.kind]}</span>
            <SegmentTokens segment={segment} turn={turn} shading={shading} ranges={ranges} />
          </div>
        ),
      )}
      <TokenTable turn={turn} />
    </>
  );
}

function Context({ segment, turn, ranges }: { segment: Segment; turn: Turn; ranges: Ranges }) {
  const [isOpen, setOpen] = useState(false);
  return (
    <details class="segment-row" open={isOpen} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <span class="kind is-context">context</span>{" "}
        <span class="soft small num">
          {count(segment.num_tokens, "token")} kept from {turn.parent === null ? "before" : `turn ${turn.parent}`}
        </span>
      </summary>
      {isOpen && <SegmentTokens segment={segment} turn={turn} shading="none" ranges={ranges} />}
    </details>
  );
}

// --- around the conversation --------------------------------------------------------------------------------------------

function Head({ answer, sources, route }: AttemptProps) {
  const { trajectory } = answer;
  const source = sources.sources.find((each) => each.id === route.source);
  const asked = trajectory.messages.slice(0, 4).map((message) => ({ role: String(message?.role), text: contentText(message?.content) }));
  const title = scenarioTitle(trajectory.scenario, asked) || trajectory.id;
  const group = useAnswer<Group>(
    `/api/source/${encodeURIComponent(route.source)}/step/${answer.step}/${encodeURIComponent(answer.split)}/group/${encodeURIComponent(answer.group_id)}`,
  ).value;
  const scale = scaleOf(group?.attempts.map((attempt) => attempt.reward) ?? [trajectory.reward ?? null]);
  useEffect(() => document.querySelector(".siblings [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }), [route.id, group]);
  return (
    <div class="head">
      <nav class="crumbs" aria-label="Where this is">
        {sources.sources.length > 1 && <Label text={source?.name ?? route.source} />}
        <a href={link.step(route.source, answer.step, answer.split)}>{stepName(source, answer.step, answer.split)}</a>
        <a href={link.group(route.source, answer.step, answer.split, answer.group_id)}>
          group <Label text={answer.group_id} max={60} />
        </a>
        <span>attempt {trajectory.index}</span>
        <span class="push">
          <Neighbour id={answer.previous} text={"\u2039 previous"} source={route.source} />
          <Neighbour id={answer.next} text={"next \u203a"} source={route.source} />
        </span>
      </nav>
      <Heading title={`Attempt ${trajectory.id}`}>
        <Label text={title} max={160} />
      </Heading>
      <div class="siblings" role="group" aria-label="Attempts of this group">
        {group === undefined ? (
          <RewardChip value={trajectory.reward ?? null} scale={scale} label={`attempt ${trajectory.index}`} />
        ) : (
          group.attempts.map((attempt) => (
            <RewardChip
              key={attempt.id}
              value={attempt.reward}
              scale={scale}
              label={`attempt ${attempt.index}`}
              href={link.trajectory(route.source, attempt.id)}
              hasFailed={attempt.error !== null}
              isCurrent={attempt.id === trajectory.id}
            />
          ))
        )}
      </div>
    </div>
  );
}

/** What the learner recorded of the attempt as a whole. */
function learnedRows({ loss, left_out, masked }: TrajectoryAnswer): [string, string][] {
  const rows: [string, string][] = [];
  if (loss !== null) rows.push(["share of the loss", number(loss)]);
  if (left_out !== null) rows.push(["not trained on", left_out.replaceAll("_", " ")]);
  for (const [reason, tokens] of Object.entries(masked ?? {})) rows.push([`tokens left out, ${reason.replaceAll("_", " ")}`, number(tokens)]);
  return rows;
}

function Neighbour({ id, text, source }: { id: string | null; text: string; source: string }) {
  return id === null ? <span class="faint">{text}</span> : <a href={link.trajectory(source, id)}>{text}</a>;
}

function Facts({ answer, source }: { answer: TrajectoryAnswer; source: string }) {
  const { trajectory, turns } = answer;
  const sampled = turns.reduce((sum, turn) => sum + turn.segments.filter((s) => s.kind === "sampled").reduce((n, s) => n + s.num_tokens, 0), 0);
  const rows: [string, string][] = [
    ["reward", rewardText(trajectory.reward ?? null)],
    ...(trajectory.returned_reward !== null && trajectory.returned_reward !== trajectory.reward ? [["returned by the rollout", number(trajectory.returned_reward)] as [string, string]] : []),
    ...learnedRows(answer),
    ["turns", number(turns.length)],
    ["tokens sampled", number(sampled)],
    ["duration", seconds(trajectory.duration_s)],
    ...(trajectory.started_at > 0 ? [["started", new Date(trajectory.started_at * 1000).toISOString().replace("T", " ").slice(0, 19)] as [string, string]] : []),
  ];
  return (
    <>
      {trajectory.error !== null && (
        <section class="failed">
          <h2>Failed</h2>
          <LongText text={trajectory.error} fold={600} />
        </section>
      )}
      <section>
        <h2>Attempt</h2>
        <dl class="pairs">
          {rows.map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd class="num">{value}</dd>
            </div>
          ))}
          {trajectory.limit !== null && (
            <div>
              <dt>stopped by</dt>
              <dd>{trajectory.limit.replaceAll("_", " ")}</dd>
            </div>
          )}
        </dl>
      </section>
      {(trajectory.scores ?? []).length > 0 && (
        <section>
          <h2>Judge</h2>
          <Scores scores={trajectory.scores ?? []} />
        </section>
      )}
      {(trajectory.shadow ?? []).length > 0 && (
        <section>
          <h2>Shadow judges, not trained on</h2>
          <Scores scores={trajectory.shadow ?? []} />
        </section>
      )}
      {Object.keys(trajectory.metrics).length > 0 && (
        <section>
          <h2>Metrics</h2>
          <MetricsList metrics={trajectory.metrics} />
        </section>
      )}
      <section class="more">
        {answer.scenario_id !== null && (
          <p>
            <a href={link.scenario(source, answer.scenario_id, new URLSearchParams({ b: trajectory.id }).toString())}>This scenario across steps</a>
          </p>
        )}
        <JsonDetails title="scenario" value={trajectory.scenario} />
        {trajectory.tools.length > 0 && <JsonDetails title={count(trajectory.tools.length, "tool definition")} value={trajectory.tools} />}
        {Object.keys(trajectory.metadata).length > 0 && <JsonDetails title="metadata" value={trajectory.metadata} />}
      </section>
    </>
  );
}
