"""The style of pages: one look for light and dark screens, limited to dlio's own part."""

from typing import Final

HEAD: Final = """<style>
.dlio { --ink: #1d2330; --soft: #667085; --line: #e3e6ec; --paper: #f6f7f9; --card: #fff;
  --accent: #3f51b5; font: 14px/1.45 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); padding: 20px 28px; box-sizing: border-box; }
@media (prefers-color-scheme: dark) { .dlio { --ink: #e6e8ee; --soft: #98a1b3; --line: #323846;
  --paper: #14171d; --card: #1c2028; --accent: #9fa8ff; } }
.dlio-page { margin: 0; background: #f6f7f9; }
@media (prefers-color-scheme: dark) { .dlio-page { background: #14171d; } }
.dlio h1 { font-size: 20px; margin: 0 0 8px; overflow-wrap: anywhere; }
.dlio h2 { font-size: 14px; margin: 0 0 10px; overflow-wrap: anywhere; }
.dlio h2 small { font-weight: normal; font-size: 13px; color: var(--soft); }
.dlio i, .dlio figcaption, .dlio th { color: var(--soft); font-style: normal; }
.dlio code { font: 12px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.dlio table { border-collapse: collapse; background: none; margin: 0; }
.dlio th { font-weight: normal; text-align: left; vertical-align: top; padding: 2px 16px 2px 0;
  white-space: nowrap; }
.dlio td { padding: 2px 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
.dlio tr { background: none; }
.dlio .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; margin: 14px 0; }
.dlio .row, .dlio .crops { display: flex; flex-wrap: wrap; gap: 14px; align-items: flex-start; }
.dlio .crops { flex: 1 1 240px; }
.dlio figure { margin: 0; max-width: 100%; flex: none; }
.dlio figcaption { font-size: 12px; margin-top: 4px; }
.dlio .stack { position: relative; line-height: 0; max-width: 100%; overflow: hidden;
  border-radius: 4px; }
.dlio .stack img { width: 100%; display: block; margin: 0; image-rendering: auto; }
.dlio .stack .mask, .dlio .stack svg { position: absolute; left: 0; top: 0; width: 100%;
  height: 100%; }
.dlio .stack .mask { image-rendering: pixelated; }
.dlio .stack rect { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.dlio .stack rect.part { stroke: #fff; stroke-dasharray: 6 4; }
.dlio .stack text.part { fill: #fff; font-weight: 400; }
.dlio .stack circle { stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.dlio .stack text { font-family: system-ui, sans-serif; font-weight: 600; paint-order: stroke;
  stroke: #000c; stroke-width: 3px; vector-effect: non-scaling-stroke; }
.dlio .plot polyline { fill: none; stroke: var(--accent); stroke-width: 1.5; }
.dlio .about, .dlio .fields { margin-top: 10px; }
.dlio .error { color: #d92d20; margin: 0; }
.dlio .marks { margin-top: 10px; display: flex; gap: 16px; }
.dlio:has(.show-boxes:not(:checked)) .box, .dlio:has(.show-masks:not(:checked)) .stack .mask,
.dlio:has(.show-keypoints:not(:checked)) .keypoint { display: none; }
.dlio .bars td, .dlio .bars th { padding: 1px 10px 1px 0; vertical-align: middle; }
.dlio .bars .bar { width: 420px; max-width: 50vw; }
.dlio .bars .bar div { height: 12px; background: var(--accent); border-radius: 2px; }
.dlio .bars .number { text-align: right; font-variant-numeric: tabular-nums; }
.dlio h3 { font-size: 14px; margin: 0 0 8px; }
</style>"""
