// A figure says the value of what is pointed at, tapped, or reached by the arrow keys.
for (const plot of document.querySelectorAll(".labkit-plot[data-places]")) {
  const places = JSON.parse(plot.dataset.places); // left, top, right, bottom in percent, and the text
  const spot = document.createElement("div");
  const tip = document.createElement("div");
  let shown = -1;
  tip.className = "labkit-tip";
  tip.setAttribute("role", "status");
  plot.append(tip);
  const hide = () => { shown = -1; tip.textContent = ""; spot.remove(); };
  const show = (index) => {
    const [left, top, right, bottom, text] = places[(shown = index)];
    spot.className = "labkit-spot";
    spot.style.cssText = `left: ${left}%; top: ${top}%; width: ${right - left}%; height: ${bottom - top}%`;
    plot.append(spot);
    tip.textContent = text;
    const width = plot.clientWidth;
    const middle = ((left + right) / 200) * width - tip.offsetWidth / 2;
    const above = (top / 100) * plot.clientHeight - tip.offsetHeight - 10;
    tip.style.left = `${Math.max(0, Math.min(width - tip.offsetWidth, middle))}px`;
    tip.style.top = `${above > 0 ? above : (bottom / 100) * plot.clientHeight + 10}px`;
  };
  const point = (event) => {
    const box = plot.getBoundingClientRect();
    const x = (100 * (event.clientX - box.left)) / box.width;
    const y = (100 * (event.clientY - box.top)) / box.height;
    const away = ([left, top, right, bottom]) =>
      Math.hypot((Math.max(left - x, 0, x - right) * box.width) / 100, (Math.max(top - y, 0, y - bottom) * box.height) / 100);
    let nearest = -1;
    let least = 32;
    places.forEach((place, index) => {
      const distance = away(place);
      if (distance < least) [nearest, least] = [index, distance];
    });
    if (nearest < 0) hide();
    else if (nearest !== shown) show(nearest);
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step || !places.length) return;
    event.preventDefault();
    show((Math.max(shown, step < 0 ? 0 : -1) + step + places.length) % places.length);
  });
}
