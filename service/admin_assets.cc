#include "service/admin_assets.h"

namespace kvstow {

const std::string_view kAdminHtml = R"html(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>kvstow</title>
<link rel="stylesheet" href="/admin.css">
</head>
<body>
<header><h1>kvstow</h1><p id="about">waiting for the service</p></header>
<main>
<section id="gauges"></section>
<section id="plots"></section>
<section><h2>Tiers</h2><div id="tiers"></div></section>
<section><h2>Codecs</h2><div id="codecs"></div></section>
<section><h2>Calls</h2><div id="methods"></div></section>
<section><h2>Counters</h2><div id="counters"></div></section>
</main>
<noscript>This page draws with its own script; the same numbers are at /metrics.</noscript>
<script src="/admin.js"></script>
</body>
</html>
)html";

const std::string_view kAdminCss = R"css(:root {
  color-scheme: light dark;
  --line: #8884; --soft: #8882; --quiet: #666;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7;
}
@media (prefers-color-scheme: dark) { :root { --quiet: #aaa; } }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
header { display: flex; align-items: baseline; gap: 1rem; flex-wrap: wrap; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
#about { margin: 0; color: var(--quiet); }
#about.lost { color: var(--c1); }
#gauges { display: grid; grid-template-columns: repeat(auto-fit, minmax(7rem, 1fr)); gap: .6rem;
  margin: .8rem 0; }
#gauges div { background: var(--soft); border-radius: .4rem; padding: .45rem .7rem; }
#gauges b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
#gauges span { color: var(--quiet); font-size: .85rem; }
#plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; }
figcaption { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; }
figcaption i { font-style: normal; font-size: .85rem; }
svg { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif;
  fill: currentColor; }
svg line { stroke: var(--line); }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
polyline.c0 { stroke: var(--c0); } polyline.c1 { stroke: var(--c1); }
polyline.c2 { stroke: var(--c2); } polyline.c3 { stroke: var(--c3); }
i.c0 { color: var(--c0); } i.c1 { color: var(--c1); } i.c2 { color: var(--c2); }
i.c3 { color: var(--c3); }
section > div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
)css";

// Text goes in as text, never as markup. Time is the service's: rates stay right when the browser
// slows a hidden page down.
const std::string_view kAdminJs = R"js('use strict';
const kPoints = 300;
const kPeriodMs = 1000;
const samples = [];  // newest last: {at, rates by counter, fill by tier}
let last = null;

const byId = (id) => document.getElementById(id);
function add(parent, tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  parent.appendChild(element);
  return element;
}
function svgAdd(parent, tag, attributes, text) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}

function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let i = 0;
  while (n >= 1024 && i + 1 < units.length) { n /= 1024; ++i; }
  return (i === 0 || n >= 100 ? n.toFixed(0) : n.toFixed(1)) + ' ' + units[i];
}
const number = (n) => n >= 100 || Number.isInteger(n) ? n.toFixed(0) : n.toFixed(1);
const percent = (share) => share === null ? '-' : (100 * share).toFixed(1) + ' %';
const share = (part, whole) => whole > 0 ? part / whole : null;
function duration(s) {
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h > 0 ? h + ' h ' + m + ' min' : m > 0 ? m + ' min ' + Math.floor(s % 60) + ' s'
                                               : Math.floor(s) + ' s';
}

function table(id, heads, rows) {
  const place = byId(id);
  place.replaceChildren();
  const element = add(place, 'table');
  const head = add(add(element, 'thead'), 'tr');
  for (const name of heads) add(head, 'th', name);
  const body = add(element, 'tbody');
  for (const row of rows) {
    const line = add(body, 'tr');
    for (const cell of row) add(line, 'td', cell);
  }
}

// series: [{name, of: (point) => number or null}]; `most` null: as high as the data.
function plot(title, series, format, most) {
  const width = 440, height = 150, left = 62, bottom = 18, top = 8;
  const figure = add(byId('plots'), 'figure');
  const caption = add(figure, 'figcaption', title);
  const values = series.map((one) => samples.map(one.of));
  let high = most;
  if (high === null) high = Math.max(1e-9, ...values.flat().filter((v) => v !== null)) * 1.1;
  const svg = svgAdd(figure, 'svg', {viewBox: `0 0 ${width} ${height}`, role: 'img',
                                     'aria-label': title});
  const y = (v) => top + (1 - v / high) * (height - top - bottom);
  const span = Math.max(60, samples.length);  // a young page shows a minute
  const x = (i) => left + (span - samples.length + i) / (span - 1) * (width - left - 4);
  for (const part of [0, .5, 1]) {
    svgAdd(svg, 'line', {x1: left, x2: width - 4, y1: y(high * part), y2: y(high * part)});
    svgAdd(svg, 'text', {x: left - 5, y: y(high * part) + 4, 'text-anchor': 'end'},
           format(high * part));
  }
  svgAdd(svg, 'text', {x: left, y: height - 4}, `${duration(span * kPeriodMs / 1000)} ago`);
  svgAdd(svg, 'text', {x: width - 4, y: height - 4, 'text-anchor': 'end'}, 'now');
  series.forEach((one, s) => {
    let points = [];
    const flush = () => {
      if (points.length > 0) svgAdd(svg, 'polyline', {class: 'c' + s, points: points.join(' ')});
      points = [];
    };
    values[s].forEach((v, i) => {
      if (v === null) return flush();
      points.push(x(i).toFixed(1) + ',' + y(Math.min(v, high)).toFixed(1));
    });
    flush();
    const newest = values[s].length > 0 ? values[s][values[s].length - 1] : null;
    add(caption, 'i', one.name + ' ' + (newest === null ? '-' : format(newest)), 'c' + s);
  });
}

function drawPlots(now) {
  byId('plots').replaceChildren();
  const rate = (...names) => (point) => names.reduce((sum, n) => sum + (point.rates[n] || 0), 0);
  const part = (of, all) => (point) => share(rate(...of)(point), rate(...all)(point));
  const hits = ['dram_hits', 'nvme_hits'];
  plot('Found', [
    {name: 'blocks read', of: part(hits, [...hits, 'misses'])},
    {name: 'keys looked up', of: part(['lookup_hits'], ['lookups'])},
    {name: 'turns that follow', of: part(['follow_up_turns'], ['turns'])}], percent, 1);
  plot('Traffic', [
    {name: 'put', of: rate('put_rows_bytes', 'put_encoded_bytes')},
    {name: 'get', of: rate('get_rows_bytes', 'get_encoded_bytes')},
    {name: 'disk written', of: rate('nvme_bytes_written')},
    {name: 'disk read', of: rate('nvme_bytes_read')}], (v) => bytes(v) + '/s', null);
  plot('Full', now.tiers.map((tier, i) => ({name: tier.tier, of: (point) => point.fill[i]})),
       percent, 1);
  plot('Blocks a second', [
    {name: 'sealed', of: rate('seals')},
    {name: 'left memory', of: rate('dram_evictions')},
    {name: 'left disk', of: rate('nvme_evictions')},
    {name: 'found on disk', of: rate('nvme_hits')}], number, null);
}

function draw(now) {
  byId('about').textContent = `version ${now.version}, up ${duration(now.uptime_s)}, policy ` +
      `${now.policy}, index ${bytes(now.index_bytes)}, policy ${bytes(now.policy_bytes)}`;
  byId('about').className = '';
  const gauges = byId('gauges');
  gauges.replaceChildren();
  for (const [name, value] of [
      ['blocks', now.blocks], ['leases', now.open_leases], ['pinned', bytes(now.pinned_bytes)],
      ['tickets', now.open_tickets], ['windows', now.open_channels],
      ['calls in flight', now.calls_in_flight], ['waiting for disk', bytes(now.write_behind_bytes)],
      ['kept by hints', now.hint_pinned_blocks]]) {
    const box = add(gauges, 'div');
    add(box, 'b', value);
    add(box, 'span', name);
  }
  drawPlots(now);
  const rates = samples.length > 0 ? samples[samples.length - 1].rates : {};
  table('tiers', ['tier', 'blocks', 'used', 'capacity', 'full', 'reserved', 'hits/s',
                  'evictions/s'],
        now.tiers.map((t) => [t.tier, t.blocks, bytes(t.used_bytes), bytes(t.capacity_bytes),
                              percent(share(t.used_bytes, t.capacity_bytes)),
                              bytes(t.reserved_bytes), number(rates[t.tier + '_hits'] || 0),
                              number(rates[t.tier + '_evictions'] || 0)]));
  table('codecs', ['codec', 'blocks', 'stored', 'KV', 'ratio'],
        now.codecs.map((c) => [c.codec, c.blocks, bytes(c.record_bytes), bytes(c.logical_bytes),
                               number(share(c.logical_bytes, c.record_bytes) || 0)]));
  table('methods', ['method', 'calls', 'not OK', 'mean ms'],
        now.methods.filter((m) => m.calls > 0).map(
            (m) => [m.method, m.calls, m.failed, (1000 * m.seconds / m.calls).toFixed(2)]));
  table('counters', ['counter', 'value', 'per second'],
        Object.entries(now.counters).map(([name, value]) =>
            [name.replaceAll('_', ' '), value, number(rates[name] || 0)]));
}

function take(now) {
  const seconds = last === null ? 0 : now.uptime_s - last.uptime_s;
  if (seconds < 0) samples.length = 0;  // another daemon
  if (seconds > 0) {
    const rates = {};
    for (const [name, value] of Object.entries(now.counters)) {
      rates[name] = (value - (last.counters[name] || 0)) / seconds;
    }
    samples.push({at: now.uptime_s, rates,
                  fill: now.tiers.map((t) => share(t.used_bytes, t.capacity_bytes))});
    if (samples.length > kPoints) samples.shift();
  }
  if (last === null || seconds !== 0) last = now;
  draw(now);
}

async function poll() {
  try {
    const answer = await fetch('/stat.json', {cache: 'no-store'});
    if (!answer.ok) throw new Error('status ' + answer.status);
    take(await answer.json());
  } catch (error) {
    byId('about').textContent = 'the service does not answer: ' + error.message;
    byId('about').className = 'lost';
  }
  setTimeout(poll, kPeriodMs);
}
poll();
)js";

}  // namespace kvstow
