// Facts about attempts that several views show: metrics, a judge's scores and words.

import type { Score } from "./contract";
import { number, reward } from "./numbers";
import { Label, LongText } from "./text";

// Counts that art adds to every attempt; they are shown elsewhere, or only matter when they are not 0.
const QUIET = ["num_turns", "num_sampled", "num_cancelled", "num_abandoned", "num_branches", "num_retries"];

export function MetricsList({ metrics, max = 100 }: { metrics: Record<string, number | null>; max?: number }) {
  const shown = Object.entries(metrics).filter(([name, value]) => !QUIET.includes(name) || (value !== 0 && !["num_turns", "num_sampled"].includes(name)));
  if (shown.length === 0) return null;
  return (
    <dl class="pairs">
      {shown.slice(0, max).map(([name, value]) => (
        <div key={name}>
          <dt>
            <Label text={name} max={60} />
          </dt>
          <dd class="num">{number(value)}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Each judge's score, its votes, and what it said. */
export function Scores({ scores, isShort = false }: { scores: Score[]; isShort?: boolean }) {
  if (scores.length === 0) return null;
  return (
    <div class="scores">
      {scores.map((score, place) => (
        <div key={place} class="score">
          <p>
            <span class="score-judge">
              <Label text={score.model === null ? score.judge : `${score.judge}, ${score.model}`} max={60} />
            </span>
            <b class="num">{number(score.score)}</b>
          </p>
          {score.votes.length > 0 && (
            <p class="votes small">
              <span class="soft">votes</span>
              {score.votes.map((vote, index) => (
                <span key={index} class="vote num">
                  {reward(vote)}
                </span>
              ))}
              {!isShort && score.spread !== null && <span class="soft num">{`\u00b1\u00a0${reward(score.spread)}`}</span>}
            </p>
          )}
          {score.explanation && (
            <blockquote>
              <LongText text={score.explanation} fold={isShort ? 160 : 300} />
            </blockquote>
          )}
        </div>
      ))}
    </div>
  );
}
