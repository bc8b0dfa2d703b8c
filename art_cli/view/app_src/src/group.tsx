// A group: its attempts side by side under the prefix tree that they share. What attempts have in common stands once,
// across their columns; where they part, the columns part.

import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import type { Attempt, Group, Source, Sources, TreeNode } from "./contract";
import { useAnswer } from "./data";
import { MetricsList, Scores } from "./facts";
import { useKeys } from "./keys";
import { moveFocus } from "./curves";
import { useChoice } from "./memory";
import { Calls, JsonDetails, roleClass } from "./message";
import { count, number, reward as rewardText, seconds } from "./numbers";
import { RewardChip, scaleOf, type Scale } from "./rewards";
import { go, link, type Route } from "./route";
import { Heading, Waiting } from "./shell";
import { Label, LongText } from "./text";

type GroupRoute = Extract<Route, { page: "group" }>;

export function GroupView({ sources, route }: { sources: Sources; route: GroupRoute }) {
  const base = `/api/source/${encodeURIComponent(route.source)}/step/${route.step}/${encodeURIComponent(route.split)}`;
  const { value: group, error } = useAnswer<Group>(`${base}/group/${encodeURIComponent(route.group)}`);
  const source = sources.sources.find((each) => each.id === route.source);
  const [isWide, setWide] = useChoice("wide columns", false);
  const turn = (id: string | null | undefined) => id != null && go(link.group(route.source, route.step, route.split, id));
  useKeys([
    { keys: ["j"], says: "next attempt", run: () => moveFocus(document.querySelector(".attempts"), 1) },
    { keys: ["k"], says: "previous attempt", run: () => moveFocus(document.querySelector(".attempts"), -1) },
    { keys: ["ArrowLeft", "Shift+ArrowUp"], says: "previous group", run: () => turn(group?.previous) || false },
    { keys: ["ArrowRight", "Shift+ArrowDown"], says: "next group", run: () => turn(group?.next) || false },
    { keys: ["w"], says: "narrow or wide columns", run: () => setWide(!isWide) },
    { keys: ["u", "Escape"], says: "up to the step", run: () => go(link.step(route.source, route.step, route.split)) },
  ]);
  if (group === undefined) return <Waiting error={error} what="the group" />;
  const title = scenarioTitle(group.scenario, group.tree.nodes) || group.group_id;
  return (
    <div class="page">
      <div class="head">
        <nav class="crumbs" aria-label="Where this is">
          {sources.sources.length > 1 && <Label text={source?.name ?? route.source} />}
          <a href={link.step(route.source, route.step, route.split)}>{stepName(source, route.step, route.split)}</a>
          <span>
            group <Label text={group.group_id} max={60} />
          </span>
          <span class="push">
            <Neighbour id={group.previous} text={"\u2039 previous"} route={route} />
            <Neighbour id={group.next} text={"next \u203a"} route={route} />
          </span>
        </nav>
        <Heading title={`Group ${group.group_id}`}>
          <Label text={title} max={160} />
        </Heading>
        <Summary group={group} route={route}>
          <span class="segmented" role="group" aria-label="Columns">
            <button type="button" aria-pressed={!isWide} title="As many attempts side by side as fit (w)" onClick={() => setWide(false)}>
              fit
            </button>
            <button type="button" aria-pressed={isWide} title="Wide columns for long texts (w)" onClick={() => setWide(true)}>
              wide
            </button>
          </span>
        </Summary>
      </div>
      <Tree group={group} route={route} isWide={isWide} />
    </div>
  );
}

/** A step as a reader names it; a file has only groups. */
export function stepName(source: Source | undefined, step: number, split: string): string {
  return source?.kind === "file" ? "groups" : `step ${step}, ${split === "train" ? "training" : split === "eval" ? "evaluation" : split}`;
}

function Neighbour({ id, text, route }: { id: string | null | undefined; text: string; route: GroupRoute }) {
  if (id === undefined) return null;
  if (id === null) return <span class="faint">{text}</span>;
  return <a href={link.group(route.source, route.step, route.split, id)}>{text}</a>;
}

const MIN_QUESTION = 20; // characters from which a first message says more than the scenario's id

/** What a scenario asks: by the names that scenarios have for it, else the first message of a user, else its id. */
export function scenarioTitle(scenario: Record<string, unknown>, messages: { role: string; text: string }[]): string {
  for (const name of ["question", "prompt", "task", "instruction", "problem", "goal", "title"]) {
    const value = scenario[name];
    if (typeof value === "string" && value.trim() !== "") return value;
  }
  const asked = messages.find((message) => message.role === "user")?.text.trim() ?? "";
  return asked.length >= MIN_QUESTION ? asked : String(scenario.id ?? asked);
}

function Summary({ group, route, children }: { group: Group; route: GroupRoute; children: ComponentChildren }) {
  const rewards = group.attempts.map((attempt) => attempt.reward);
  const known = rewards.filter((value): value is number => value !== null);
  const failed = group.attempts.filter((attempt) => attempt.error !== null).length;
  return (
    <div class="facts">
      <span>{count(group.attempts.length, "attempt")}</span>
      {known.length > 0 && (
        <span>
          reward <b class="num">{rewardText(Math.min(...known))}</b> to <b class="num">{rewardText(Math.max(...known))}</b>
        </span>
      )}
      {known.length > 1 && Math.max(...known) - Math.min(...known) <= 1e-8 && <span>equal rewards: nothing to learn from</span>}
      {failed > 0 && <span class="failed">{failed} failed</span>}
      {group.scenario_id !== null && <a href={link.scenario(route.source, group.scenario_id)}>this scenario across steps</a>}
      <JsonDetails title="scenario" value={group.scenario} />
      {children}
    </div>
  );
}

// --- the tree -----------------------------------------------------------------------------------------------------------

const DEPTH = 12; // rows of the tree that are shown at first

interface Cell {
  node: TreeNode;
  first: number; // column
  span: number; // columns
  row: number;
  next: number; // number of ways on from here
}

/** The columns' order, so that what attempts share lies side by side, the best first; and each node's place. */
export function layout(group: Group): { order: number[]; cells: Cell[]; depth: number } {
  const children = new Map<string | number | null, TreeNode[]>();
  for (const node of group.tree.nodes) children.set(node.parent, [...(children.get(node.parent) ?? []), node]);
  const rewards = new Map(group.attempts.map((attempt, place) => [place, attempt.reward ?? -Infinity]));
  const best = (attempts: number[]) => attempts.reduce((most, attempt) => Math.max(most, rewards.get(attempt) ?? -Infinity), -Infinity);
  const order: number[] = [];
  const cells: Cell[] = [];
  const taken = new Set<number>();
  const take = (attempts: number[]) => {
    for (const attempt of attempts.toSorted((a, b) => best([b]) - best([a]) || a - b)) {
      if (!taken.has(attempt) && rewards.has(attempt)) order.push(attempt), taken.add(attempt);
    }
  };
  // A stack, because a tree may be thousands of nodes deep. A node's own attempts that end in it come after its children's.
  type Visit = { node: TreeNode; row: number; cell: Cell | null };
  const byBest = (nodes: TreeNode[]) => nodes.toSorted((a, b) => best(a.attempts) - best(b.attempts) || (b.attempts[0] ?? 0) - (a.attempts[0] ?? 0));
  const stack: Visit[] = byBest(children.get(null) ?? []).map((node) => ({ node, row: 0, cell: null }));
  let depth = 0;
  while (stack.length > 0) {
    const visit = stack.pop() as Visit;
    if (visit.cell !== null) {
      take(visit.node.attempts);
      visit.cell.span = Math.max(1, order.length - visit.cell.first);
      continue;
    }
    const inner = byBest(children.get(visit.node.id) ?? []);
    const cell = { node: visit.node, first: order.length, span: 1, row: visit.row, next: inner.length };
    cells.push(cell);
    depth = Math.max(depth, visit.row + 1);
    stack.push({ ...visit, cell }, ...inner.map((node) => ({ node, row: visit.row + 1, cell: null })));
  }
  take([...group.attempts.keys()]);
  return { order, cells, depth };
}

function Tree({ group, route, isWide }: { group: Group; route: GroupRoute; isWide: boolean }) {
  const { order, cells, depth } = useMemo(() => layout(group), [group]);
  const [rows, setRows] = useState(DEPTH);
  const scale = scaleOf(group.attempts.map((attempt) => attempt.reward));
  const shown = cells.filter((cell) => cell.row < rows);
  return (
    <section aria-label="Attempts side by side" class="tree-frame" tabIndex={0}>
      <div class={isWide ? "tree is-wide" : "tree"} style={{ "--columns": String(order.length) }}>
        <div class="attempts" style={{ display: "contents" }}>
          {order.map((index, place) => {
            const attempt = group.attempts[index];
            return attempt && <AttemptCard key={attempt.id} attempt={attempt} column={place + 1} route={route} scale={scale} />;
          })}
        </div>
        {shown.map((cell) => (
          <Node key={cell.node.id} cell={cell} attempts={group.attempts} />
        ))}
      </div>
      {(group.tree.num_left_out ?? 0) > 0 && <p class="soft small">{count(group.tree.num_left_out ?? 0, "message")} more on the attempts' own pages</p>}
      {depth > rows && (
        <div class="folded">
          <span>{count(depth - rows, "more message")} below</span>
          <button type="button" onClick={() => setRows(rows + 50)}>
            show more
          </button>
        </div>
      )}
    </section>
  );
}

interface CardProps {
  attempt: Attempt;
  column: number;
  route: GroupRoute;
  scale: Scale;
}

function AttemptCard({ attempt, column, route, scale }: CardProps) {
  const isOther = attempt.returned_reward !== null && attempt.reward !== null && attempt.returned_reward !== attempt.reward;
  return (
    <article class="attempt" style={{ gridColumn: String(column) }} tabIndex={-1} aria-label={`Attempt ${attempt.index}`}>
      <div class="attempt-head">
        <RewardChip value={attempt.reward} scale={scale} label={`attempt ${attempt.index}`} hasFailed={attempt.error !== null} />
        <a href={link.trajectory(route.source, attempt.id)}>attempt {attempt.index}</a>
      </div>
      {attempt.error !== null && (
        <p class="failed small">
          <Label text={attempt.error} max={200} />
        </p>
      )}
      {attempt.limit !== null && <p class="small warn">stopped: {attempt.limit.replaceAll("_", " ")}</p>}
      <p class="small soft num">
        {count(attempt.num_turns, "turn")}
        {attempt.num_tokens !== null && ` \u00b7 ${count(attempt.num_tokens, "token")}`}
        {attempt.duration_s ? ` \u00b7 ${seconds(attempt.duration_s)}` : ""}
        {isOther && ` \u00b7 returned ${number(attempt.returned_reward)}`}
      </p>
      <Scores scores={attempt.scores} isShort />
      {attempt.shadow.length > 0 && <p class="small soft">shadow judges, not trained on</p>}
      <Scores scores={attempt.shadow} isShort />
      <MetricsList metrics={attempt.metrics} max={6} />
    </article>
  );
}

interface NodeProps {
  cell: Cell;
  attempts: Attempt[];
}

function Node({ cell, attempts }: NodeProps) {
  const { node } = cell;
  const isShared = node.attempts.length > 1;
  const who = node.attempts.length === attempts.length && isShared ? "all attempts" : node.attempts.map((place) => attempts[place]?.index ?? place).join(", ");
  return (
    <div
      class={`node ${roleClass(node.role)}`}
      data-sampled={node.is_sampled || undefined}
      data-shared={isShared || undefined}
      style={{ gridColumn: `${cell.first + 1} / span ${cell.span}`, gridRow: String(cell.row + 2) }}
    >
      <div class="node-inner">
        <p class="node-head">
          <span class="role">{node.role}</span>
          {isShared && (
            <span class="soft small" title={`attempts ${who}`}>
              {who === "all attempts" ? who : `attempts ${who}`}
              {cell.next > 1 && `, then ${cell.next} ways`}
            </span>
          )}
        </p>
        {node.text !== "" && <LongText text={node.text} fold={isShared ? 800 : 400} />}
        <Calls calls={node.calls ?? []} />
        {(node.num_left_out ?? 0) > 0 && <p class="soft small">more of it on the attempt's own page</p>}
        {node.text === "" && !node.calls?.length && <span class="faint">(empty)</span>}
      </div>
    </div>
  );
}
