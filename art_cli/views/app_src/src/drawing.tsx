// A recipe's own drawing of a state, in a frame that can reach nothing: opaque origin, no network, plain data in.

import { useEffect, useRef } from "preact/hooks";
import type { SourceDetails, TrajectoryRecord } from "./contract";
import { provider, useAnswer } from "./data";

interface DrawingProps {
  source: string;
  trajectory: TrajectoryRecord;
  message: number | null; // place of the message whose state is drawn; null: the last
}

export function Drawing({ source, trajectory, message }: DrawingProps) {
  const hasDrawing = useAnswer<SourceDetails>(`/api/source/${encodeURIComponent(source)}`).value?.drawing === true;
  return hasDrawing ? <Frame source={source} trajectory={trajectory} message={message} /> : null;
}

function Frame({ source, trajectory, message }: DrawingProps) {
  const frame = useRef<HTMLIFrameElement>(null);
  const url = `/api/source/${encodeURIComponent(source)}/drawing`;
  const inFile = useAnswer<string>(provider.isFile ? url : null).value;
  const index = message ?? trajectory.messages.length - 1;
  const draw = () => frame.current?.contentWindow?.postMessage({ trajectory, message_index: index }, "*");
  useEffect(draw, [trajectory, index]);
  if (provider.isFile && inFile === undefined) return null;
  return (
    <section class="drawing">
      <h2>State at message {index}</h2>
      <iframe ref={frame} sandbox="allow-scripts" title="The recipe's drawing of the state" onLoad={draw} {...(inFile ? { srcdoc: inFile } : { src: url })} />
    </section>
  );
}
