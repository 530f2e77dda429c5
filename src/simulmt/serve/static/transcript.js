/** Text that only ever grows at its end.
 *
 * A node, once written, is never touched again. Paragraphs far above are taken out of the page as a whole, so that it
 * stays light through hours; a button brings them back.
 */

const KEPT_PARAGRAPHS = 150;
const NEAR_THE_END_PX = 48;
const FRAME_MS = 16; // a timer, since hidden pages get no animation frames and must stay light as well

export class Transcript {
  #scroller;
  #body = document.createElement("div");
  #earlierButton = document.createElement("button");
  /** @type {string[]} the text of paragraphs taken out of the page, oldest first */
  #earlier = [];
  #paragraph = null; // the one that grows
  #isFollowing = true; // the reader stays at the end, until they scroll up
  #isScrollDue = false;
  #lastTop = 0;

  /** @param {HTMLElement} scroller the element that holds the text and scrolls it */
  constructor(scroller) {
    this.#scroller = scroller;
    this.#body.className = "text";
    this.#earlierButton.className = "earlier";
    this.#earlierButton.textContent = "Show earlier text";
    this.#earlierButton.hidden = true;
    this.#earlierButton.onclick = () => this.#showEarlier();
    scroller.replaceChildren(this.#earlierButton, this.#body);
    scroller.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    new ResizeObserver(() => this.#scrollSoon()).observe(scroller);
  }

  get isEmpty() {
    return !this.#body.hasChildNodes();
  }

  /** @param {string} text */
  append(text) {
    if (!this.#paragraph) {
      this.#paragraph = document.createElement("p");
      this.#body.append(this.#paragraph);
    }
    const piece = document.createElement("span");
    piece.textContent = text;
    this.#paragraph.append(piece);
    this.#scrollSoon();
  }

  endParagraph() {
    this.#paragraph = null;
  }

  clear() {
    this.#paragraph = null;
    this.#earlier = [];
    this.#earlierButton.hidden = true;
    this.#body.replaceChildren();
    this.#isFollowing = true;
  }

  #putAway() {
    while (this.#body.childElementCount > KEPT_PARAGRAPHS) {
      const oldest = this.#body.firstElementChild;
      oldest.remove();
      this.#earlier.push(oldest.textContent);
      this.#earlierButton.hidden = false;
    }
  }

  #showEarlier() {
    const height = this.#scroller.scrollHeight;
    const paragraphs = this.#earlier.splice(-KEPT_PARAGRAPHS).map((text) => {
      const paragraph = document.createElement("p");
      paragraph.textContent = text;
      return paragraph;
    });
    this.#body.prepend(...paragraphs);
    this.#earlierButton.hidden = this.#earlier.length === 0;
    this.#isFollowing = false;
    this.#scroller.scrollTop += this.#scroller.scrollHeight - height; // the reader keeps their place
  }

  #noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    if (scrollHeight - scrollTop - clientHeight < NEAR_THE_END_PX) this.#isFollowing = true;
    else if (scrollTop < this.#lastTop) this.#isFollowing = false;
    this.#lastTop = scrollTop;
  }

  #scrollSoon() {
    if (this.#isScrollDue) return;
    this.#isScrollDue = true;
    setTimeout(() => {
      this.#isScrollDue = false;
      if (this.#isFollowing) this.#follow();
    }, FRAME_MS);
  }

  #follow() {
    this.#putAway();
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#lastTop = this.#scroller.scrollTop; // so that this is not taken for the reader's doing
  }
}
