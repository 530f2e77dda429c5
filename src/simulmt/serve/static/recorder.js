/** An audio worklet that makes 16-bit PCM of the microphone: mono, at the sample rate of its context. */

const SAMPLES_A_CHUNK = 1600; // 100 ms at 16 kHz

class Recorder extends AudioWorkletProcessor {
  #chunk = new Int16Array(SAMPLES_A_CHUNK);
  #length = 0;

  /** @param {Float32Array[][]} inputs */
  process([channels]) {
    const [samples = []] = channels; // the context mixes all channels into one
    for (const sample of samples) {
      this.#chunk[this.#length] = Math.max(-1, Math.min(1, sample)) * 0x7fff;
      this.#length += 1;
      if (this.#length === SAMPLES_A_CHUNK) this.#send();
    }
    return true;
  }

  #send() {
    this.port.postMessage(this.#chunk.buffer, [this.#chunk.buffer]);
    this.#chunk = new Int16Array(SAMPLES_A_CHUNK);
    this.#length = 0;
  }
}

registerProcessor("recorder", Recorder);
