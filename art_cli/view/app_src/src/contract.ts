// What the server answers: art_cli/view/page_answers.py. Numbers that are NaN or infinite arrive as null.

export interface StepSummary {
  step: number;
  split: string;
  num_groups: number;
  num_trajectories: number;
  mean_reward: number | null;
  sources?: string[]; // of rollout.sources
  problems?: string[];
}

export interface Source {
  id: string;
  name: string;
  path: string;
  kind: "run" | "file";
  is_running: boolean;
  indexing: { done_bytes: number; bytes: number } | null;
  num_trajectories: number;
  has_plan: boolean; // whether `art plan` was asked about the run
  steps: StepSummary[];
}

export interface Sources {
  revision: number;
  left_out: number;
  chat: boolean;
  sources: Source[];
}

/** What `art plan` printed: four questions with their rows, of which a name of "" goes on from the one above. */
export interface Plan {
  sections: [question: string, rows: [name: string, text: string][]][];
  pilots: { rate: number; kl: number | null; clip_fraction: number | null; seconds: number }[];
  expected: string[][]; // a head, and a row for each number
}

export type Point = [step: number, value: number | null];

export interface Finding {
  kind: string;
  title: string;
  text: string;
  reasons: { text: string }[];
  cures: string[];
  at: { step: number; split: string };
}

export interface Evaluated {
  step: number;
  metric: string;
  mean: number | null;
  low: number | null;
  high: number | null;
  n: number;
}

export interface SourceDetails {
  config: Record<string, unknown> | null;
  metrics: Record<string, Record<string, Point[]>>;
  intervals: Record<string, Record<string, [step: number, low: number | null, high: number | null][]>>;
  evaluations: Evaluated[];
  findings: Finding[];
  judge: { steps: number[] } | null;
  drawing?: "given" | "found" | null; // found: beside the run, so that the viewer is asked first
  problems?: string[];
  checkpoints: number[];
  best_step: number | null;
  stages: Record<string, Point[]>;
  plan?: Plan | null;
  reward_names?: Record<string, string>; // split -> what its reward is, such as "share of wins"; absent without a run
}

export interface GroupRow {
  group_id: string;
  scenario_id: string;
  label: string;
  rewards: (number | null)[];
  mean: number | null;
  spread: number | null;
  num_errors: number;
  error: string | null;
  num_turns: number | null;
  num_tokens: number | null;
  ids: string[];
  source?: string;
  num_attempts?: number; // more than `rewards` has where the group is very large
  text?: string | null; // in a file only, for its search
}

export interface GroupRows {
  total: number;
  rows: GroupRow[];
}

export interface HistogramBins {
  bins: { low: number; high: number; count: number }[];
  missing: number;
}

export interface Score {
  judge: string;
  score: number | null;
  model: string | null;
  explanation: string | null;
  votes: (number | null)[];
  spread: number | null;
  cost_usd: number | null;
}

export interface Attempt {
  id: string;
  index: number;
  reward: number | null;
  returned_reward: number | null;
  error: string | null;
  limit: string | null;
  metrics: Record<string, number | null>;
  scores: Score[];
  shadow: Score[]; // of shadow judges, never trained on
  num_turns: number;
  num_tokens: number | null;
  duration_s: number | null;
}

export interface TreeNode {
  id: string | number;
  parent: string | number | null;
  role: string;
  text: string;
  calls: ToolCall[];
  attempts: number[]; // places in the group's list of attempts
  is_sampled: boolean;
  num_left_out?: number;
}

export interface Group {
  group_id: string;
  scenario: Record<string, unknown>;
  scenario_id: string | null; // its name among those of all steps and sources
  attempts: Attempt[];
  tree: { nodes: TreeNode[]; num_left_out?: number };
  num_attempts?: number;
  previous?: string | null;
  next?: string | null;
}

export interface ToolCall {
  id?: string;
  name?: string;
  arguments?: unknown;
  function?: { name?: string; arguments?: unknown };
}

export interface Message {
  role: string;
  content?: unknown;
  reasoning_content?: unknown;
  reasoning?: unknown;
  name?: string;
  tool_call_id?: string;
  tool_calls?: ToolCall[];
  refusal?: unknown;
}

export type SegmentKind = "template" | "context" | "message" | "tool" | "sampled";

export interface Segment {
  kind: SegmentKind;
  text: string;
  num_tokens: number;
  tokens: string[] | null;
  ids: number[];
  logprobs: (number | null)[] | null;
  learner_logprobs: (number | null)[] | null;
  advantages: (number | null)[] | null;
}

export interface Turn {
  index: number;
  parent: number | null;
  kept: number;
  step: number;
  temperature: number | null;
  finish_reason: string;
  segments: Segment[];
  conversation: number | null; // 0: the trajectory's messages, 1: its first branch; null: not told
  message: number | null; // place of its reply in that conversation
  is_abandoned: boolean;
}

export interface TrajectoryRecord {
  id: string;
  group_id: string;
  group_size: number;
  index: number;
  step: number;
  scenario: Record<string, unknown>;
  messages: Message[];
  branches: Message[][];
  tools: unknown[];
  metrics: Record<string, number | null>;
  metadata: Record<string, unknown>;
  returned_reward: number | null;
  reward?: number | null;
  scores?: Score[];
  shadow?: Score[]; // of shadow judges, never trained on
  error: string | null;
  limit: string | null;
  started_at: number;
  duration_s: number | null;
}

export interface TrajectoryAnswer {
  trajectory: TrajectoryRecord;
  step: number;
  split: string;
  group_id: string;
  scenario_id: string | null;
  previous: string | null;
  next: string | null;
  turns: Turn[];
  has_tokens: boolean;
  loss: number | null; // its share of the loss
  left_out: string | null; // why the learner did not train on it
  masked: Record<string, number> | null; // sampled tokens that were not trained, by reason
}

export interface ScenarioAttempt {
  step: number;
  split: string;
  id: string;
  reward: number | null;
  reply: string;
  error?: string | null;
}

export interface JudgeReport {
  step: number;
  lines: [name: string, value: string][];
}
