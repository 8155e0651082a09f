"""The style sheet of the report: dark and light, narrow and wide, and on paper. Nothing is fetched from anywhere."""

from __future__ import annotations

CSS = """
:root{color-scheme:light dark;--bg:#fbfbf9;--card:#fff;--ink:#1d2226;--soft:#667078;--line:#e3e4df;--track:#ecece7;
--system:#8257c2;--developer:#c2559d;--user:#2b7fc4;--assistant:#2c9a5b;--tool:#b8801a;--document:#8a8f94;
--trained:#2c9a5b;--context:#6f86a6;--cut:#d97b29;--dropped:#cf3f3f;--injected:#2aa3ad;--padding:#b4b7b2;
--trained-bg:#def3e5;--analysis:#b8801a;--final:#2c9a5b}
@media screen and (prefers-color-scheme:dark){:root{--bg:#14171a;--card:#1b1f23;--ink:#e6e8e6;--soft:#98a1a8;
--line:#2d3338;
--track:#2a2f34;--system:#b392ef;--developer:#e58cc4;--user:#6cb4f0;--assistant:#5fcb8c;--tool:#e0b04e;
--document:#8d9499;--trained:#4fbd7c;--context:#7d94b5;--cut:#ea9a52;--dropped:#ec6a6a;--injected:#4fc0ca;
--padding:#565c60;--trained-bg:#173626;--analysis:#e0b04e;--final:#5fcb8c}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:1.7rem;margin:0;line-height:1.2;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:44px 0 4px}
h3{font-size:1rem;margin:0 0 10px}
p{margin:4px 0 14px;max-width:60rem}.soft,header span,figcaption{color:var(--soft)}
nav{margin:12px 0 0;display:flex;flex-wrap:wrap;gap:4px 18px}nav a{color:var(--user);text-decoration:none}
nav a:hover{text-decoration:underline}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:12px;margin:22px 0 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 12px}
.tile b{display:block;font-size:1.25rem;font-weight:650;line-height:1.25;font-variant-numeric:tabular-nums}
.tile>span{color:var(--soft);font-size:.86rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px;margin:12px 0;
overflow-x:auto;break-inside:avoid}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:12px}
.two{align-items:start}.two>.card{margin:0}.two>div{min-width:0}
.two>div>.card:first-child{margin-top:0}
svg{display:block;width:100%;height:auto;font:12px system-ui,sans-serif}
svg.chart{max-width:520px}svg text{fill:var(--ink);dominant-baseline:auto}
svg.flow{min-width:720px}svg.map{min-width:640px}
svg.flow text{dominant-baseline:middle;paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
svg .head{fill:var(--soft);font-size:11px;letter-spacing:.06em;text-transform:uppercase}
svg .name{font-weight:600}svg .count{fill:var(--soft)}
.band{opacity:.36}.band:hover{opacity:.7}.node.source{fill:var(--soft)}
.role-system{--c:var(--system)}.role-developer{--c:var(--developer)}.role-user{--c:var(--user)}
.role-assistant{--c:var(--assistant)}.role-tool{--c:var(--tool)}.role-document{--c:var(--document)}
.role-repeated{--c:var(--injected)}.role-padding{--c:var(--padding)}.role-analysis{--c:var(--analysis)}
.role-final{--c:var(--final)}
.fate-trained{--c:var(--trained)}.fate-context{--c:var(--context)}.fate-cut{--c:var(--cut)}
.fate-dropped{--c:var(--dropped)}.fate-injected{--c:var(--injected)}.fate-padding{--c:var(--padding)}
.band,.node{fill:var(--c,var(--soft))}
.chart .bar{fill:var(--context)}.chart .axis{stroke:var(--line)}.chart text{fill:var(--soft);font-size:11px}
.map text{fill:var(--soft);font-size:11px}.map .pad{fill:var(--track)}.map .d0{fill:var(--context);opacity:.55}
.map .d1{fill:var(--context);opacity:.32}.map .got{fill:var(--trained)}
table{border-collapse:collapse;width:100%;font-size:.9rem}th{font-weight:600;text-align:left;color:var(--soft)}
td,th{padding:5px 10px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}tr:last-child td{border-bottom:0}
td:first-child{min-width:7em}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.meter{width:22%;min-width:90px;padding-right:0}
td.meter{vertical-align:middle;background:linear-gradient(var(--track),var(--track)) no-repeat center/100% 8px}
.meter span{display:block;height:8px;border-radius:2px;background:var(--trained)}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;background:var(--c,var(--soft));margin-right:.5em}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;margin:10px 0 0;color:var(--soft);font-size:.86rem}
.sample{background:var(--card);border:1px solid var(--line);border-radius:12px;margin:12px 0;overflow:hidden}
.sample header{display:flex;flex-wrap:wrap;gap:2px 14px;justify-content:space-between;padding:10px 16px;
border-bottom:1px solid var(--line);overflow-wrap:anywhere}.sample header span{font-size:.86rem}
.message{display:grid;grid-template-columns:92px minmax(0,1fr);gap:12px;padding:8px 16px;border-left:4px solid var(--c)}
.who{color:var(--c);font-weight:600;font-size:.86rem;padding-top:1px}
.text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:plaintext;font:13px/1.55 ui-monospace,"SF Mono",
Menlo,Consolas,"DejaVu Sans Mono",monospace}
.c{color:var(--soft)}.t{background:var(--trained-bg);border-radius:2px;box-decoration-break:clone}
.control{border:1px solid var(--line);border-radius:4px;padding:0 3px;margin:0 1px;font-size:.86em;color:var(--soft)}
.t.control{border-color:var(--trained);color:inherit;font-weight:600}.text em,.more{color:var(--soft);font-size:.86em}
.more{padding:4px 16px 10px;margin:0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.84rem;margin:8px 0 0}
details summary{cursor:pointer;color:var(--user)}code{font-size:.92em;overflow-wrap:anywhere}
.notes{list-style:none;margin:12px 0}.notes li{padding:3px 0 3px 14px;border-left:4px solid var(--trained)}
.notes li+li{margin-top:8px}.notes .warn{border-color:var(--cut)}h3{margin-top:6px}
footer{margin-top:48px;color:var(--soft);font-size:.86rem}
@media(max-width:560px){.message{grid-template-columns:1fr;gap:0}main{padding:20px 12px 40px}td.meter{min-width:56px}}
@media print{:root{color-scheme:light;--bg:#fff}body{font-size:11px}nav{display:none}
main{max-width:none;padding:0}.card,.sample,.tile{break-inside:avoid}h2{break-after:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}.card{overflow:visible}
svg.flow,svg.map{min-width:0}}
"""
