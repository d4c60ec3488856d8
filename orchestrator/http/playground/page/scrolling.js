// Text that grows stays in view, unless its reader has scrolled away from its end.

const NEAR_PX = 60;

/** Changes what is in an element, and keeps its end in view where it was. */
export function following(element, change) {
  const wasAtEnd = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_PX;
  change();
  if (wasAtEnd) element.scrollTop = element.scrollHeight;
}
