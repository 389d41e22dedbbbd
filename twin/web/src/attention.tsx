// Sound and notifications of new critical alarms: both off until somebody switches them on in this browser.
import { useEffect, useRef, useState } from "preact/hooks";
import { live, useLive } from "./live";
import { brief } from "./words";

const KEY = "racktwin.attention";
interface Wanted { sound: boolean; notify: boolean }

function read(): Wanted {
  try { return { sound: false, notify: false, ...JSON.parse(localStorage.getItem(KEY) ?? "{}") }; } catch { return { sound: false, notify: false }; }
}

let wanted = read(), audio: AudioContext | null = null;

// A browser lets a page sound only after somebody clicked in it.
function awake(): void {
  if (!wanted.sound) return;
  audio ??= new AudioContext();
  if (audio.state === "suspended") audio.resume().catch(() => {});
}
addEventListener("pointerdown", awake, { capture: true });
addEventListener("keydown", awake, { capture: true });

// Two short tones, the second higher.
function beep(): void {
  awake();
  if (!audio) return;
  [660, 880].forEach((hz, i) => {
    const tone = audio!.createOscillator(), loud = audio!.createGain(), at = audio!.currentTime + i * 0.22;
    tone.frequency.value = hz;
    loud.gain.setValueAtTime(0.0001, at);
    loud.gain.exponentialRampToValueAtTime(0.25, at + 0.02);
    loud.gain.exponentialRampToValueAtTime(0.0001, at + 0.2);
    tone.connect(loud).connect(audio!.destination);
    tone.start(at);
    tone.stop(at + 0.21);
  });
}

const allowed = (): boolean => "Notification" in window && Notification.permission === "granted";

// Rings for critical alarms that begin while this page is open; those that stood before are shown, and do not ring.
export function Attention() {
  useLive("alarms", "who");
  const known = useRef<Set<string> | null>(null);
  useEffect(() => {
    if (!live.alarmsAt) { known.current = null; return; }
    const now = live.alarms.filter((a) => a.severity === "critical" && a.state !== "shelved" && !a.ack_author), fresh = known.current ? now.filter((a) => !known.current!.has(a.id)) : [];
    known.current = new Set(now.map((a) => a.id));
    if (!fresh.length) return;
    if (wanted.sound) beep();
    if (wanted.notify && allowed()) {
      const note = new Notification(`▲ ${brief(fresh[0].title)}${fresh.length > 1 ? ` and ${fresh.length - 1} more` : ""}`, { body: fresh[0].action, tag: fresh[0].id });
      note.onclick = () => { focus(); location.hash = `#/alarms/${encodeURIComponent(fresh[0].id)}`; note.close(); };
    }
  });
  return null;
}

export function AttentionSwitches() {
  const [, again] = useState(0), [why, setWhy] = useState("");
  const set = (to: Partial<Wanted>) => { wanted = { ...wanted, ...to }; localStorage.setItem(KEY, JSON.stringify(wanted)); again((n) => n + 1); };
  const notify = async () => {
    setWhy("");
    if (wanted.notify) { set({ notify: false }); return; }
    if (!("Notification" in window)) { setWhy("This browser cannot show notifications for this page"); return; }
    const said = await Notification.requestPermission();
    if (said === "granted") set({ notify: true });
    else setWhy("The browser blocks notifications from this page");
  };
  return <>
    <button type="button" class="small" aria-pressed={wanted.sound} title="Plays two tones for each new critical alarm while this page is open. After a reload, click once to enable sound." onClick={() => { set({ sound: !wanted.sound }); if (wanted.sound) beep(); }}>Sound</button>
    <button type="button" class="small" aria-pressed={wanted.notify && allowed()} title="Shows a browser notification for each new critical alarm while this page is open" onClick={notify}>Notify</button>
    {why && <span class="soft" role="status">{why}</span>}
  </>;
}
