// Asks for the accounts each second, and draws them. Text goes in as text only. docs/status.md says what the keys are.
"use strict";

const EVERY_MS = 1000, MOST_SAMPLES = 900, RELEASED_FOR_MS = 15000, MOST_RELEASED = 5, FRESH_MS = 15000;
const NUMBERS = ["transactions", "rows", "bytes", "took", "pid", "memory"];  // columns whose texts are numbers
const seen = new Map();  // slot → {samples, open, released}

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const number = (n) => n.toLocaleString("en-US");
const counted = (n, noun) => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
const waiting = (n, noun) => `${counted(n, noun)} ${n === 1 ? "waits" : "wait"}`;
const utc = (at) => at.slice(11, 19);

function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024) return `${n.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}

function seconds(s) {
  if (s < 10) return `${s.toFixed(1)} s`;
  s = Math.round(s);
  for (const [unit, smaller, n, m] of [["d", "h", 86400, 3600], ["h", "min", 3600, 60], ["min", "s", 60, 1]])
    if (s >= n) return `${Math.floor(s / n)} ${unit} ${Math.floor((s % n) / m)} ${smaller}`;
  return `${s} s`;
}

const ms = (n) => (n < 1000 ? `${n.toFixed(0)} ms` : `${(n / 1000).toFixed(1)} s`);

function card(title, waits, big, ...facts) {
  const lines = facts.filter(Boolean).map((fact) => make("div", "fact dim", fact));
  return make("section", waits ? "card waits" : "card", make("h3", "", title), make("div", "big", big), ...lines);
}

function bar(share, full) {
  const inner = make("div");
  inner.style.width = `${Math.max(0, Math.min(100, share * 100))}%`;
  return make("div", full ? "bar full" : "bar", inner);
}

function wide(title, ...children) {
  return make("section", "card wide", make("h3", "", title), ...children);
}

function table(names, rows) {
  const isText = (i) => !NUMBERS.includes(names[i]);
  const row = (tag, cells) => make("tr", "", ...cells.map((cell, i) =>
    make(tag, isText(i) ? "" : "n", cell === null ? "" : typeof cell === "number" ? number(cell) : cell)));
  // A table that is wider than a phone is moved sideways, and not the page.
  return make("div", "scroll", make("table", "", make("thead", "", row("th", names)),
    make("tbody", "", ...rows.map((cells) => row("td", cells)))));
}

// -- over time ---------------------------------------------------------------------------------------------------

function remember(account, now) {
  const name = account.run.slot;
  if (!seen.has(name)) seen.set(name, {samples: [], open: new Map(), released: []});
  const memory = seen.get(name);
  memory.samples.push({at: now, behind: account.slot && account.slot.behind_bytes, held: account.slot && account.slot.wal_held_bytes,
    undelivered: account.slot && account.slot.undelivered_bytes, journal: account.journal && account.journal.n_bytes,
    lag: lagOf(account)});
  if (memory.samples.length > MOST_SAMPLES) memory.samples.shift();
  if (account.reader) {
    const open = new Map(account.open.map((each) => [each.xid, each]));
    for (const [xid, each] of memory.open) if (!open.has(xid) && account.reader.n_open <= open.size) memory.released.push({at: now, each});
    memory.open = open;
  }
  memory.released = memory.released.filter((each) => now - each.at < RELEASED_FOR_MS).slice(-MOST_RELEASED);
  return memory;
}

// Seconds from COMMIT to the sink, now. An old batch's lag is no present one: where nothing waits it is 0. What the sink has in hand is late by as long as it has been there, and what is in
// the journal since it committed.
function lagOf({at, run, sink, journal}) {
  const last = sink && sink.batches[sink.batches.length - 1];
  const isOld = last && run.is_caught_up && Date.parse(at) - Date.parse(last.done_at) > FRESH_MS;
  const known = [sink && sink.last_lag_ms !== null ? (isOld ? 0 : sink.last_lag_ms / 1000) : null,
    sink && sink.in_hand ? sink.in_hand.for_s : null, journal ? journal.oldest_s : null].filter((each) => each !== null);
  return known.length ? Math.max(...known) : null;
}

function curve(title, samples, key, shown, limit, fact) {
  const known = samples.filter((each) => each[key] !== null && each[key] !== undefined);
  if (known.length < 2) return null;
  const most = Math.max(...known.map((each) => each[key]), 1e-9);
  const first = known[0].at, span = Math.max(1, known[known.length - 1].at - first);
  const points = known.map((each) => `${((each.at - first) / span * 100).toFixed(2)},${(38 - each[key] / most * 36).toFixed(2)}`);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}: now ${shown(known[known.length - 1][key])}, at most ${shown(most)}`);
  const line = document.createElementNS(svg.namespaceURI, "line");
  for (const [k, v] of [["x1", 0], ["x2", 100], ["y1", 39], ["y2", 39]]) line.setAttribute(k, v);
  const path = document.createElementNS(svg.namespaceURI, "path");
  path.setAttribute("d", `M${points.join(" L")}`);
  svg.append(line, path);
  const axis = make("div", "axis", make("span", "", `the last ${seconds(span / 1000)}`), make("span", "", `at most ${shown(most)}`));
  return make("section", "card", make("h3", "", title), make("div", "big", shown(known[known.length - 1][key])), svg, axis,
    limit ? bar(known[known.length - 1][key] / limit, known[known.length - 1][key] > 0.8 * limit) : null,
    limit ? make("div", "fact dim", `limit ${bytes(limit)}`) : null, fact ? make("div", "fact dim", fact) : null);
}

// -- one slot ----------------------------------------------------------------------------------------------------

function way(account) {
  const {slot, reader, sequencer, journal, sink, log} = account;
  const waits = (part) => account.stalls.some((stall) => stall.part === part || stall.waits_for === part);
  const cards = [];
  if (slot) cards.push(card("slot", waits("server"), `${bytes(slot.behind_bytes)} behind`,
    `confirmed ${slot.confirmed_lsn} of ${slot.server_lsn}`, `holds ${bytes(slot.wal_held_bytes)} of WAL (${slot.wal_status})`,
    slot.undelivered_bytes > slot.behind_bytes && `the sink is ${bytes(slot.undelivered_bytes)} behind`,
    slot.lost_in_s !== null && `lost in ${seconds(slot.lost_in_s)} if nothing more is confirmed`));
  else if (account.slot_error) cards.push(card("slot", true, "not known", account.slot_error));
  if (reader) cards.push(card("slot reader", reader.paused_by || waits("slot reader"),
    reader.paused_by ? "paused" : reader.bytes_per_s === null ? "reading" : `${bytes(reader.bytes_per_s)}/s`,
    reader.paused_by && `${reader.paused_by} is reached`,
    reader.messages_per_s !== null && `${number(Math.round(reader.messages_per_s))} messages/s`, `${bytes(reader.n_bytes)} read`));
  if (reader) cards.push(card("xid buffers", waits("xid buffers"), counted(reader.n_open, "open transaction"),
    counted(reader.n_open_rows, "row"), `${bytes(reader.in_flight_bytes + reader.pending_bytes)} not decoded yet`,
    counted(reader.n_buffers, "buffer") + (reader.n_buffers_asked ? `, ${reader.n_buffers_asked} more requested` : "")));
  if (sequencer) cards.push(card("commit sequencer", waits("commit sequencer"), `${number(sequencer.n_waiting)} waiting`,
    `confirmed ${sequencer.confirmed_lsn}`,
    sequencer.delivered_lsn && sequencer.delivered_lsn !== sequencer.confirmed_lsn && `delivered ${sequencer.delivered_lsn}`, sequencer.n_prepared && `${sequencer.n_prepared} prepared`,
    reader && reader.backlog_bytes && `${bytes(reader.backlog_bytes)} wait for the sink`));
  if (journal && journal.n_files) cards.push(card("journal", journal.is_full || waits("journal"), bytes(journal.n_bytes),
    journal.is_full && "full: what commits now waits in the slot",
    `${waiting(journal.n_transactions, "transaction")} for the sink, in ${counted(journal.n_files, "file")}`,
    journal.oldest_s !== null && `the oldest committed ${seconds(journal.oldest_s)} ago`,
    journal.max_bytes && `limit ${bytes(journal.max_bytes)}`));
  if (sink) cards.push(card("sink", waits("sink"),
    sink.in_hand ? `writing for ${seconds(sink.in_hand.for_s)}` : sink.rows_per_s ? `${number(Math.round(sink.rows_per_s))} rows/s` : "idle",
    sink.in_hand && `${counted(sink.in_hand.n_transactions, "transaction")}, ${counted(sink.in_hand.n_rows, "row")} in hand`,
    `${counted(sink.n_rows, "row")} delivered`,
    sink.latency && `COMMIT to sink ${ms(sink.latency.p50_ms)} (p50), ${ms(sink.latency.p99_ms)} (p99)`));
  if (log) cards.push(logCard(log));
  return make("div", "cards", ...cards);
}

// What is left of the change log, and who holds it back. The furthest behind comes first.
function logCard(log) {
  const first = log.consumers[0], forgotten = log.consumers.filter((each) => each.is_forgotten);
  return card("change log", forgotten.length || log.error, log.reach_bytes === null ? "not known" : `${bytes(log.reach_bytes)} of WAL`,
    log.oldest_lsn && `states from ${log.oldest_lsn} on`,
    log.cut_lsn ? `changes behind ${log.cut_lsn}, cut in ${number(log.n_cut_tables)} of ${counted(log.n_tables, "table")}` : log.last_commit_lsn && "nothing was cut",
    first && `${counted(log.n_consumers, "consumer")}, ${first.name} ${first.behind_bytes ? `${bytes(first.behind_bytes)} behind` : "has all"}`,
    first && first.held_bytes && `holds back ${bytes(first.held_bytes)}`,
    ...forgotten.map((each) => `${each.name} has told nothing for ${seconds(each.told_s)}`),
    log.error && `could not be read: ${log.error}`);
}

// What a whole bar stands for: the next of 1, 2, 5, 10, …, so that the bar of the only transaction grows.
function scaleOf(n) {
  let scale = 1;
  while (scale < n) scale *= `${scale}`.startsWith("2") ? 2.5 : 2;
  return scale;
}

function stateOf({run, reader, open}) {
  if (run.state !== "reading" || !run.is_caught_up) return run.state;
  const n = reader ? reader.n_open : 0;
  if (!n) return "caught up";
  return `caught up with commits · reading ${open.length ? `xid ${open[0].xid}${n > 1 ? ` and ${number(n - 1)} more` : ""}` : counted(n, "open transaction")}`;
}

function openRow(each, most, released) {
  const tables = each.tables.slice(0, 3).join(", ") + (each.n_tables > 3 ? ` and ${each.n_tables - 3} more` : "");
  const facts = [released ? "ended" : `open for ${seconds(each.age_s)}`, counted(each.n_rows, "row"), bytes(each.n_bytes),
    `${bytes(each.n_bytes_spilled)} spilled`, `buffer ${each.buffer}`, tables];
  if (each.n_rolled_back_subtransactions) facts.splice(4, 0, `${counted(each.n_rolled_back_subtransactions, "subtransaction")} rolled back`);
  return make("div", released ? "open released" : "open", make("strong", "", `xid ${each.xid}`), bar(each.n_rows / most),
    make("div", "fact", facts.join(" · ")));
}

function lastLag(sink) {
  const last = sink && sink.batches[sink.batches.length - 1];
  const lag = last && (last.lag_ms ?? sink.last_lag_ms);
  return last && lag !== null && `${ms(lag)} in the last batch, at ${utc(last.done_at)} UTC`;
}

function draw(account, now) {
  const run = account.run, memory = remember(account, now), stalled = account.stalls.length > 0;
  const state = stalled ? "stalled" : stateOf(account);
  const tone = stalled ? "bad" : run.state === "reading" ? "good" : "warn";
  const parts = [make("div", "head", make("h2", "", run.slot), make("span", `state ${tone}`, state),
    make("span", "dim", `running for ${seconds((Date.parse(account.at) - Date.parse(run.started_at)) / 1000)}`),
    run.waiting_for.length ? make("span", "warn", `waiting for ${run.waiting_for.join(" and ")}`) : null,
    make("span", "dim", `process ${run.pid} on ${run.host}`),
    account.n_restarts ? make("span", "warn", counted(account.n_restarts, "restart")) : null)];
  for (const stall of account.stalls)
    parts.push(make("p", "stall", make("strong", "bad", `The ${stall.part} waits for the ${stall.waits_for}: `), stall.text));
  for (const each of (account.sequencer && account.sequencer.parked) || [])
    parts.push(make("p", "stall", make("strong", "bad", `Table ${each.table} is parked: `),
      `${counted(each.n_changes, "change")} of ${counted(each.n_transactions, "transaction")} left out since commit LSN ${each.since_lsn}: ${each.reason}`));
  parts.push(way(account));
  if (account.open.length || memory.released.length) {
    const most = scaleOf(Math.max(1, ...account.open.map((each) => each.n_rows), ...memory.released.map((each) => each.each.n_rows)));
    parts.push(wide(`open transactions (a whole bar is ${counted(most, "row")})`, ...memory.released.map((each) => openRow(each.each, most, true)),
      ...account.open.slice(0, 20).map((each) => openRow(each, most, false))));
  }
  const {slot, journal} = account;
  const without = slot && slot.wal_held_without_journal_bytes > slot.wal_held_bytes;
  parts.push(make("div", "cards", curve("not confirmed yet", memory.samples, "behind", bytes),
    curve("not in the sink yet", memory.samples, "undelivered", bytes),
    curve("lag from COMMIT to the sink", memory.samples, "lag", seconds, null, lastLag(account.sink)),
    curve("WAL held", memory.samples, "held", bytes, slot && slot.wal_limit_bytes,
      without && `without the journal it would be ${bytes(slot.wal_held_without_journal_bytes)}`),
    memory.samples.some((each) => each.journal) ? curve("journal", memory.samples, "journal", bytes, journal && journal.max_bytes) : null));
  if (account.prepared.length)
    parts.push(wide("prepared transactions", table(["xid", "gid", "LSN", "rows", "bytes"],
      account.prepared.map((each) => [`${each.xid}`, each.gid, each.prepare_lsn, each.n_rows, bytes(each.n_bytes)]))));
  const snapshots = account.snapshots;
  if (snapshots && (snapshots.tables.length || snapshots.n_finished))
    parts.push(wide("snapshots", make("div", "fact dim", `${number(snapshots.n_finished)} taken, ${number(snapshots.tables.length)} to go · ${counted(snapshots.tables.reduce((n, each) => n + each.n_rows, snapshots.n_rows_finished), "row")} read`), ...snapshots.tables.map((each) => make("div", "open", make("strong", "", each.table),
      bar(each.n_bytes ? each.n_bytes_read / each.n_bytes : 0), make("div", "fact",
        `${each.state} · ${each.n_ranges_read} of ${each.n_ranges} ranges · ${counted(each.n_rows, "row")}`)))));
  if (account.sink && account.sink.batches.length)
    parts.push(wide("last batches", table(["done (UTC)", "transactions", "rows", "bytes", "took", "up to"],
      account.sink.batches.slice(-5).reverse().map((each) => [utc(each.done_at), each.n_transactions, each.n_rows,
        bytes(each.n_bytes), ms(each.seconds * 1000), each.last_commit_lsn]))));
  if (account.restarts.length)
    parts.push(wide("events", ...account.restarts.slice(-10).reverse().map((each) => make("div", "event",
      make("div", "dim", `${each.at.slice(0, 19).replace("T", " ")} UTC`), make("div", "", each.message), make("div", "dim", `what to do: ${each.remedy}`)))));
  if (account.processes.length)
    parts.push(wide("processes", table(["process", "pid", "node", "memory"], account.processes.map((each) =>
      [each.part, each.pid === null ? "no answer" : `${each.pid}`, each.node || "", each.memory_bytes === null ? "" : bytes(each.memory_bytes)]))));
  return make("article", "slot", ...parts);
}

async function ask() {
  const when = document.getElementById("when");
  try {
    const answer = await fetch("accounts.json", {cache: "no-store"});
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const accounts = (await answer.json()).filter((account) => account.run);
    document.getElementById("slots").replaceChildren(...accounts.map((account) => draw(account, Date.now())));
    when.textContent = `as of ${utc(new Date().toISOString())} UTC`;
    when.className = "";
    const stalled = accounts.some((account) => account.stalls.length);
    document.title = `${stalled ? "stalled · " : ""}${accounts.map((account) => account.run.slot).join(", ")} · xidstream`;
  } catch (error) {
    console.error(error);
    when.textContent = "the run does not answer: it has ended or is restarting (`xidstream status` says which)";
    when.className = "bad";
  }
  setTimeout(ask, EVERY_MS);
}

ask();
