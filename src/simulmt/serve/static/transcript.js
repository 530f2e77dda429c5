/** Text that grows at its end, in paragraphs.
 *
 * Old paragraphs are removed from the page, so that it stays fast in long sessions; a button shows them again.
 */

const KEPT_PARAGRAPHS = 150;
const NEAR_THE_END_PX = 48;
const WHERE_TO_READ = 0.6; // reading position as a fraction of the height, if unread text follows
const FRAME_MS = 16; // a timer, since hidden pages get no animation frames

export class Transcript {
  #scroller;
  #body = document.createElement("div");
  #earlierButton = document.createElement("button");
  /** @type {HTMLElement[]} paragraphs removed from the page, oldest first */
  #earlier = [];
  #isFollowing = true; // scroll with new text, until the user scrolls up
  #isScrollDue = false;
  #lastTop = 0;
  #end;

  /**
   * @param {HTMLElement} root holds the text
   * @param {HTMLElement} scroller scrolls it
   * @param {() => HTMLElement | null} end of the text to keep in view, if unread text follows
   */
  constructor(root, scroller = root, end = () => null) {
    this.#scroller = scroller;
    this.#end = end;
    this.#body.className = "text";
    this.#earlierButton.type = "button";
    this.#earlierButton.className = "earlier";
    this.#earlierButton.textContent = "Show earlier text";
    this.#earlierButton.hidden = true;
    this.#earlierButton.onclick = () => this.#showEarlier();
    root.replaceChildren(this.#earlierButton, this.#body);
    scroller.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    new ResizeObserver(() => this.scrollSoon()).observe(scroller);
  }

  get isEmpty() {
    return !this.#body.hasChildNodes() && this.#earlier.length === 0;
  }

  /** Append to the last paragraph if it has this key, else start a new one.
   *  @param {string} text @param {number | string} key */
  append(text, key) {
    let paragraph = this.#body.lastElementChild;
    if (paragraph?.dataset.key !== String(key)) {
      paragraph = document.createElement("p");
      paragraph.dataset.key = String(key);
      this.#body.append(paragraph);
    }
    const piece = document.createElement("span");
    piece.textContent = text;
    paragraph.append(piece);
    this.scrollSoon();
  }

  /** Mark a paragraph as undone. @param {number | string} key */
  strike(key) {
    this.#find(key)?.setAttribute("role", "deletion");
  }

  /** Return the text of a paragraph. @param {number | string} key */
  textOf(key) {
    return this.#find(key)?.textContent.trim() ?? "";
  }

  /** Remove the last paragraph. @returns {string} its text */
  pop() {
    const last = this.#body.lastElementChild ?? this.#earlier.pop();
    last?.remove();
    return last?.textContent ?? "";
  }

  clear() {
    this.#earlier = [];
    this.#earlierButton.hidden = true;
    this.#body.replaceChildren();
    this.#isFollowing = true;
  }

  /** Scroll to the end, unless the user has scrolled up. */
  scrollSoon() {
    if (this.#isScrollDue) return;
    this.#isScrollDue = true;
    setTimeout(() => {
      this.#isScrollDue = false;
      if (this.#isFollowing) this.#follow();
    }, FRAME_MS);
  }

  /** @param {number | string} key @returns {HTMLElement | undefined} */
  #find(key) {
    const paragraphs = [...this.#earlier, ...this.#body.children];
    return paragraphs.findLast((paragraph) => paragraph.dataset.key === String(key));
  }

  #removeOld() {
    while (this.#body.childElementCount > KEPT_PARAGRAPHS) {
      const oldest = this.#body.firstElementChild;
      oldest.remove();
      oldest.textContent = oldest.textContent; // one node instead of one per word
      this.#earlier.push(oldest);
      this.#earlierButton.hidden = false;
    }
  }

  #showEarlier() {
    const height = this.#scroller.scrollHeight;
    this.#body.prepend(...this.#earlier.splice(-KEPT_PARAGRAPHS));
    this.#earlierButton.hidden = this.#earlier.length === 0;
    this.#isFollowing = false;
    this.#scroller.scrollTop += this.#scroller.scrollHeight - height; // keep the scroll position
  }

  #noteScroll() {
    const { scrollTop } = this.#scroller;
    if (this.#wantedTop() - scrollTop < NEAR_THE_END_PX) this.#isFollowing = true;
    else if (scrollTop < this.#lastTop) this.#isFollowing = false;
    this.#lastTop = scrollTop;
  }

  #wantedTop() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    const end = this.#end();
    if (!end) return scrollHeight - clientHeight;
    const below = end.getBoundingClientRect().bottom - this.#scroller.getBoundingClientRect().top;
    return Math.min(scrollHeight - clientHeight, scrollTop + below - clientHeight * WHERE_TO_READ);
  }

  #follow() {
    this.#removeOld();
    this.#scroller.scrollTop = this.#wantedTop();
    this.#lastTop = this.#scroller.scrollTop; // so that it does not count as a scroll by the user
  }
}
