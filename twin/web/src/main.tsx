// The shell of the application: login, navigation, keys, and which page is shown.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import "./style.css";
import { get, keepToken, onRefused, readToken } from "./api";
import { changed, forget, isHub, live, ownHallsAlone, ownRowsAlone, start, useLive, watch } from "./live";
import { Attention } from "./attention";
import { Announcer } from "./parts";
import { brief, clock, hrefOf, num, short, since, span, title } from "./words";
import { Alarms } from "./pages/alarms";
import { Decisions } from "./pages/decisions";
import { EntityPage } from "./pages/entity";
import { Fleet } from "./pages/fleet";
import { Ledger } from "./pages/ledger";
import { Jobs, Replacement } from "./pages/work";
import { Overview } from "./pages/overview";
import { Policies } from "./pages/policies";
import { Cooling, Power } from "./pages/supply";
import { SetUp } from "./pages/setup";
import { WhatIf } from "./pages/whatif";

const PAGES: [string, string, string][] = [
  ["", "Overview", "o"], ["alarms", "Alarms", "a"], ["decisions", "Decisions", "d"], ["power", "Power", "p"], ["cooling", "Cooling", "c"],
  ["policies", "Policies", "i"], ["jobs", "Jobs", "j"], ["replacement", "Replacement", "r"], ["ledger", "Ledger", "l"], ["whatif", "What if", "w"], ["setup", "Set up", "s"],
];

// Pages that a hub does not have: its halls own the racks, jobs and repairs.
const OF_HALLS = ["power", "cooling", "jobs", "replacement", "ledger", "whatif"];
const nameOf = (path: string, name: string): string => (path === "" && (isHub() || ownHallsAlone()) ? "Fleet" : name);

function pages(): typeof PAGES {
  if (ownRowsAlone()) return PAGES.filter(([path]) => path === "ledger");
  if (ownHallsAlone()) return PAGES.filter(([path]) => path === "");
  return isHub() ? PAGES.filter(([path]) => !OF_HALLS.includes(path)) : PAGES;
}

function Page({ path }: { path: string[] }) {
  const [head, ...rest] = path;
  switch (head) {
    case "": return isHub() ? <Fleet /> : <Overview />;
    case "alarms": return <Alarms id={rest.join("/")} />;
    case "decisions": return <Decisions query={rest.join("/")} />;
    case "power": return <Power />;
    case "cooling": return <Cooling />;
    case "policies": return <Policies name={rest[0] ?? ""} />;
    case "jobs": return <Jobs />;
    case "replacement": return <Replacement />;
    case "ledger": return <Ledger />;
    case "whatif": return <WhatIf id={rest[0] ?? ""} />;
    case "setup": return <SetUp />;
    case "e": return <EntityPage key={rest.join("/")} table={rest[0]} name={rest.slice(1).join("/")} />;
    default: return <div class="page"><h1>Page not found</h1><p><a href="#/">Overview</a></p></div>;
  }
}

function here(): string[] {
  return location.hash.replace(/^#\/?/, "").split("/").map((p) => { try { return decodeURIComponent(p); } catch { return p; } });
}

function Login() {
  const [why, setWhy] = useState(live.why);
  useLive("who");
  useEffect(() => setWhy(live.why), [live.why]);
  return <main class="login"><form class="panel" onSubmit={(e) => {
    e.preventDefault();
    const token = String(new FormData(e.currentTarget).get("token") ?? "").trim();
    if (!/^[\x21-\x7e]+$/.test(token)) { setWhy("This is not a token"); return; }
    keepToken(token);
    live.why = "";
    start();
  }}>
    <h1>Enter a token</h1>
    <p>A token of any role can read this page. The browser keeps the token until you close the tab. On the daemon's host,
      <code>state/admin.token</code> holds an administrator's token, and <code>racktwin token link</code> prints a link that contains
      it. <code>racktwin token add NAME --role viewer</code> creates a token for a display. To open this page from another machine,
      forward the port over SSH: <code>ssh -L 8077:127.0.0.1:8077 HOST</code>.</p>
    <label>Token<input name="token" type="password" autocomplete="off" spellcheck={false} /></label>
    {why && <p class="failure" role="alert">{why}</p>}
    <button class="main" type="submit">Show</button>
  </form></main>;
}

function Banner() {
  useLive("link");
  return <div class={`banner ${live.silent ? "shown" : ""}`} role="alert">{live.silent}</div>;
}

// The current chapter of a simulated story.
function Story() {
  useLive("state");
  const s = live.state, story = s?.story;
  if (!story || !s?.simulated) return null;
  return <aside class="story" aria-label="Story of the simulation"><span class="chip c-simulated">simulated</span>
    <span><b>{story.chapter} of {story.of} · {story.title}</b>{story.text && <> — {brief(story.text)}</>}<span class="soft"> · {since(story.since_ns)}</span></span></aside>;
}

const LOOKS = ["auto", "light", "dark"] as const;

function setLook(look: string, wall: boolean): void {
  if (look === "auto") delete document.documentElement.dataset.look;
  else document.documentElement.dataset.look = look;
  document.documentElement.classList.toggle("wall", wall);
  localStorage.setItem("racktwin.look", JSON.stringify([look, wall]));
  changed("look");
}

function Header({ help, find }: { help?: () => void; find?: () => void }) {
  useLive("state", "link");
  const [tick, again] = useState(0);
  const [look, wall] = readLook();
  useEffect(() => { const t = setInterval(() => again((n) => n + 1), 1000); return () => clearInterval(t); }, []);
  const s = live.state, age = s ? s.ticks.age_s + (performance.now() - live.stateAt) / 1000 : 0;
  void tick;
  return <header class="top">
    <a class="site" href="#/">{s?.site ?? "racktwin"}</a>
    {s && <><span class={`chip ${s.role === "leader" ? "c-ok" : "c-warning"}`}>{s.role}</span>
      {s.mode !== "normal" && <span class="chip c-critical">{s.mode === "held" ? "held: only protective commands" : s.mode}</span>}
      {s.simulated && <span class="chip c-simulated">simulated</span>}
      <span class="soft num ticks">tick {num(s.ticks.tick)}, {span(age)} ago</span></>}
    <span class="grow" />
    {find && <button type="button" class="small find" onClick={find} title="Find an entity (/)">Find <kbd>/</kbd></button>}
    <button type="button" class="small" onClick={() => setLook(LOOKS[(LOOKS.indexOf(look as any) + 1) % 3], wall)} title="Light, dark or the system's setting">{title(look)}</button>
    <button type="button" class="small wall-switch" aria-pressed={wall} onClick={() => setLook(look, !wall)} title="Larger text for a wall display">Wall</button>
    {help && <button type="button" class="small" onClick={help} title="Keys (?)" aria-label="Keys">?</button>}
    <button type="button" class="small" onClick={() => forget("")}>Forget token</button>
    <time class="clock num">{clock(Date.now() * 1e6)} UTC</time>
  </header>;
}

function readLook(): [string, boolean] {
  try {
    const [look, wall] = JSON.parse(localStorage.getItem("racktwin.look") ?? '["auto",false]');
    return [LOOKS.includes(look) ? look : "auto", !!wall];
  } catch { return ["auto", false]; }
}

function Nav({ at }: { at: string }) {
  useLive("alarms", "state");
  const c = live.alarmCounts, wait = live.state?.wanting?.length ?? 0;
  return <nav class="nav" aria-label="Pages"><ul>{pages().map(([path, name]) => <li>
    <a href={`#/${path}`} aria-current={path === at ? "page" : undefined}>{nameOf(path, name)}
      {path === "alarms" && (c.critical ? <span class="count n-critical">▲ {c.critical}</span> : c.warning ? <span class="count n-warning">◆ {c.warning}</span> : null)}
      {path === "policies" && wait > 0 && <span class="count n-warning">{wait} wait{wait === 1 ? "s" : ""}</span>}</a></li>)}</ul></nav>;
}

function Find({ close }: { close: () => void }) {
  const [text, setText] = useState(""), [found, setFound] = useState<any[]>([]), [error, setError] = useState(""), ref = useRef<HTMLDialogElement>(null);
  useEffect(() => ref.current?.showModal(), []);
  useEffect(() => {
    if (!text.trim()) { setFound([]); return; }
    const t = setTimeout(() => get(`find?text=${encodeURIComponent(text.trim())}&limit=15`).then((d) => { setFound(d.found); setError(""); }, (e) => setError(e.message)), 120);
    return () => clearTimeout(t);
  }, [text]);
  const open = (f: any) => { close(); location.hash = hrefOf(f.table, f.name); };
  return <dialog ref={ref} class="finder" aria-label="Find" onClose={close}>
    <form onSubmit={(e) => { e.preventDefault(); if (found[0]) open(found[0]); }}>
      <label>Find a rack, node, GPU, CDU, feeder or job<input type="search" value={text} onInput={(e) => setText(e.currentTarget.value)} placeholder="r1/node3" autocomplete="off" autofocus /></label>
      {error && <p class="failure">{error}</p>}
      <ul class="found" aria-live="polite">{found.map((f) => <li><a href={hrefOf(f.table, f.name)} onClick={close}><b>{short(f.shown)}</b> <span class="soft">{f.table} {f.name}</span></a></li>)}
        {text && !found.length && !error && <li class="soft">No entity matches</li>}</ul>
    </form>
  </dialog>;
}

function Help({ close }: { close: () => void }) {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => ref.current?.showModal(), []);
  return <dialog ref={ref} aria-label="Keys" onClose={close}><h2>Keys</h2>
    <dl class="keys"><dt><kbd>/</kbd></dt><dd>find an entity</dd><dt><kbd>?</kbd></dt><dd>this list</dd><dt><kbd>Esc</kbd></dt><dd>close</dd>
      {pages().map(([path, name, key]) => <><dt><kbd>g</kbd> <kbd>{key}</kbd></dt><dd>{nameOf(path, name)}</dd></>)}</dl>
    {live.state?.contact && <p>Questions: <b>{live.state.contact}</b></p>}
    <div class="row end"><button type="button" onClick={() => ref.current?.close()}>Close</button></div></dialog>;
}

function App() {
  useLive("who", "link");
  const [path, setPath] = useState(here()), [open, setOpen] = useState(""), main = useRef<HTMLElement>(null);
  useEffect(() => {
    const moved = () => { setPath(here()); main.current?.focus({ preventScroll: true }); scrollTo(0, 0); };
    let going = -Infinity;  // when "g" was pressed
    const key = (e: KeyboardEvent) => {
      const on = e.target as HTMLElement;
      if (e.ctrlKey || e.metaKey || e.altKey || on.closest("input,select,textarea,dialog")) return;
      if (ownRowsAlone() || ownHallsAlone()) return;
      if (performance.now() - going < 1500) {
        const page = pages().find(([, , k]) => k === e.key);
        going = -Infinity;
        if (page) { location.hash = `#/${page[0]}`; e.preventDefault(); }
      } else if (e.key === "g") going = performance.now();
      else if (e.key === "/") { setOpen("find"); e.preventDefault(); }
      else if (e.key === "?") setOpen("help");
    };
    addEventListener("hashchange", moved);
    addEventListener("keydown", key);
    return () => { removeEventListener("hashchange", moved); removeEventListener("keydown", key); };
  }, []);
  if (live.asking) return <Login />;
  if (ownRowsAlone() || ownHallsAlone()) return <><Header /><div class="frame"><Nav at={pages()[0][0]} /><main ref={main} id="main" tabIndex={-1}>{ownHallsAlone() ? <Fleet /> : <Ledger />}</main></div><Announcer /></>;
  return <>
    <a class="skip" href="#main" onClick={(e) => { e.preventDefault(); main.current?.focus(); }}>Skip to content</a>
    <Header help={() => setOpen("help")} find={() => setOpen("find")} />
    <Banner />
    <Story />
    <div class={`frame ${live.silent ? "late" : ""}`}>
      <Nav at={path[0]} />
      <main ref={main} id="main" tabIndex={-1}><Shown path={path} /></main>
    </div>
    <Announcer />
    <Attention />
    {open === "find" && <Find close={() => setOpen("")} />}
    {open === "help" && <Help close={() => setOpen("")} />}
  </>;
}

function Shown({ path }: { path: string[] }) {
  useLive("state");
  const s = live.state;
  useEffect(() => {
    const name = path[0] === "e" ? short(path.slice(2).join("/")) : nameOf(path[0], PAGES.find(([p]) => p === path[0])?.[1] ?? "");
    document.title = `${live.alarmCounts.critical ? `▲ ${live.alarmCounts.critical} ` : ""}${name} · ${s?.site ?? "racktwin"}`;
  });
  return s && live.layout ? <Page path={path} /> : <p class="page soft">Waiting for the daemon …</p>;
}

setLook(...readLook());
onRefused((why) => { if (!live.asking) forget(why); });
watch();
live.asking = !readToken();
const app = document.getElementById("app")!;
app.replaceChildren(); // what was painted before this script came
render(<App />, app);
if (!live.asking) start();
