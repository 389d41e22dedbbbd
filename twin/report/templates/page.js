(function(){'use strict';
var T=JSON.parse(document.getElementById('times').textContent),box=document.getElementById('read'),
last=null;
function hide(){box.style.display='none';if(last){last.remove();last=null}}
function show(svg,e){var d=svg._d||(svg._d=JSON.parse(svg.dataset.p)),r=svg.getBoundingClientRect(),
w=svg.viewBox.baseVal.width,x=(e.clientX-r.left)*w/r.width,f=(x-d.l)/(d.r-d.l),n=T.at.length,i=0,j;
if(!n||f<-.03||f>1.06){hide();return}
for(j=1;j<n;j++)if(Math.abs(T.at[j]-f)<Math.abs(T.at[i]-f))i=j;
hide();last=svg.querySelector('line').cloneNode(false);
var px=d.l+T.at[i]*(d.r-d.l);[['x1',px],['x2',px],['y1',d.t],['y2',d.b],['class','cursor']].forEach(
function(a){last.setAttribute(a[0],a[1])});svg.appendChild(last);box.textContent='';
function row(text,kind){var p=document.createElement('div');p.textContent=text;if(kind)p.className=kind;
box.appendChild(p)}
row(T.say[i]);d.s.forEach(function(s){var v=s[2][i];
row((s[0]?s[0]+'  ':'')+(v===null?'–':v.toLocaleString('en')+(d.u?' '+d.u:'')),'c'+s[1])});
box.style.display='block';var bw=box.offsetWidth,bh=box.offsetHeight,X=e.clientX+14,Y=e.clientY+14;
if(X+bw>innerWidth-4)X=Math.max(4,e.clientX-bw-14);if(Y+bh>innerHeight-4)Y=Math.max(4,e.clientY-bh-14);
box.style.left=X+'px';box.style.top=Y+'px'}
document.querySelectorAll('svg[data-p]').forEach(function(svg){
svg.addEventListener('pointermove',function(e){show(svg,e)});
svg.addEventListener('pointerdown',function(e){show(svg,e)});
svg.addEventListener('pointerleave',hide)});addEventListener('scroll',hide,{passive:true})})();
