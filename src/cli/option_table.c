/* option_table.c - every option, as data. Help, manual page, docs/cli.md and the parser
 * read it; nothing else names an option. */
#include "cli/tables.h"

const char *const cli_group_title[CLI_G_COUNT] = {
    [CLI_G_INPUT] = "Input",       [CLI_G_LENGTH] = "Length",
    [CLI_G_SAMPLING] = "Sampling", [CLI_G_DOWNLOAD] = "Download",
    [CLI_G_TRAINING] = "Training", [CLI_G_EXPORT] = "Export",
    [CLI_G_EVAL] = "Evaluation",   [CLI_G_BENCH] = "Measurement",
    [CLI_G_SERVER] = "Server",     [CLI_G_METHOD] = "Attention method",
    [CLI_G_COMPUTE] = "Computing", [CLI_G_OUTPUT] = "Output",
};

#define AT(field) offsetof(cli_options, field)
#define MOST_TOKENS 16777216

/* clang-format off */
const cli_option cli_option_table[] = {
    /* input */
    {"prompt", 'p', "TEXT", CLI_STRING, AT(prompt), GENERATE, CLI_G_INPUT,
     .help = "Text to continue; - is standard input. Special tokens written in it, such as "
             "<|im_start|>, are read as those tokens."},
    {"model", 'm', "MODEL", CLI_STRING, AT(named_model),
     RUN | INSPECT | TOKENIZE | LINEARIZE | EXPORT | BENCH | SALIENCY | ALLOCATE, CLI_G_INPUT,
     .help = "The model, instead of as an argument."},
    {"prompt-file", 'f', "FILE", CLI_STRING, AT(prompt_file), GENERATE, CLI_G_INPUT,
     .help = "Read the prompt from FILE, byte for byte; - is standard input."},
    {"system", 0, "TEXT", CLI_STRING, AT(system), CHAT, CLI_G_INPUT,
     .help = "System message at the start of the conversation."},
    {"system-file", 0, "FILE", CLI_STRING, AT(system_file), CHAT, CLI_G_INPUT,
     .help = "Read the system message from FILE; - is standard input."},
    {"lines", 0, NULL, CLI_FLAG, AT(lines), CHAT, CLI_G_INPUT,
     .help = "Standard input is no terminal: take each line as a message, or as a command "
             "that starts with /. Without this option the whole input is one message."},
    {"chat-template", 0, "NAME|FILE", CLI_STRING, AT(chat_template),
     CHAT | TOKENIZE | SERVE, CLI_G_INPUT,
     .help = "Use this chat template (Jinja) instead of the model's own: a file, or "
             "chatml, llama3, mistral, gemma or phi3."},
    {"template-arg", 0, "KEY=VALUE", CLI_STRINGS, AT(template_arg),
     CHAT | TOKENIZE | SERVE, CLI_G_INPUT,
     .help = "Set a variable of the chat template, such as enable_thinking=false. A "
             "value that is JSON is read as that, any other is a string. May be given "
             "up to 16 times."},
    {"chat", 0, "FILE", CLI_STRING, AT(chat), TOKENIZE, CLI_G_INPUT,
     .help = "Read a conversation from FILE, a JSON list of messages or an object with "
             "messages, tools and other variables; - is standard input. Prints the text "
             "that the chat template makes of it, then its ids."},
    {"ids", 0, "FILE", CLI_STRING, AT(ids), LOGPROBS, CLI_G_INPUT,
     .help = "JSON list of token ids; - is standard input."},
    {"file", 'f', "FILE", CLI_STRING, AT(file), TOKENIZE, CLI_G_INPUT,
     .help = "Read the text from FILE, byte for byte; - is standard input."},
    {"tokenizer", 0, "FILE", CLI_STRING, AT(tokenizer), TOKENIZE, CLI_G_INPUT,
     .help = "Use this tokenizer instead of a model's: tokenizer.json, SentencePiece "
             ".model, tekken.json, tiktoken ranks, GGUF, or a folder."},
    {"split", 0, "RULE", CLI_STRING, AT(split), TOKENIZE, CLI_G_INPUT,
     .help = "How text is split before it is merged, for tiktoken ranks, which do not "
             "say: qwen2, llama-bpe, tekken or another name that GGUF files use."},
    {"tokenizer", 0, "PATH", CLI_STRINGS, AT(tokenizers), SELFTEST, CLI_G_INPUT,
     .help = "File or folder to search for vocabularies (up to four)."},
    {"model", 'm', "MODEL", CLI_STRING, AT(model), SELFTEST, CLI_G_INPUT,
     .preset = "smollm2", .help = "Model for the end-to-end suite."},
    {"special", 0, NULL, CLI_FLAG, AT(special), TOKENIZE, CLI_G_INPUT,
     .help = "Read the text of special tokens as those tokens; with --decode, write "
             "them out."},
    {"bos", 0, NULL, CLI_FLAG, AT(bos), TOKENIZE, CLI_G_INPUT,
     .help = "Start with the beginning-of-text token if the tokenizer is configured to."},
    {"decode", 'd', NULL, CLI_FLAG, AT(decode), TOKENIZE, CLI_G_INPUT,
     .help = "Decode instead: the input is ids, the output is text."},

    /* length */
    {"n-predict", 'n', "N", CLI_INT, AT(n), GENERATE, CLI_G_LENGTH, .preset = "128",
     .max = MOST_TOKENS, .help = "Write at most N tokens."},
    {"n-predict", 'n', "N", CLI_INT, AT(n), CHAT, CLI_G_LENGTH, .preset = "512",
     .min = 1, .max = MOST_TOKENS, .help = "Write at most N tokens per reply."},
    {"stop", 0, "TEXT", CLI_STRINGS, AT(stop), SAMPLE, CLI_G_LENGTH,
     .help = "Stop before writing TEXT; may be given up to 16 times."},
    {"ignore-eos", 0, NULL, CLI_FLAG, AT(ignore_eos), SAMPLE, CLI_G_LENGTH,
     .help = "Continue after end-of-text tokens."},
    {"ctx", 'c', "N", CLI_INT, AT(ctx), GENERATE, CLI_G_LENGTH,
     .min = 1, .max = MOST_TOKENS,
     .help = "Tokens the context holds (default: prompt and -n together, at most the "
             "trained length; with --save-state and --load-state, the trained length)."},
    {"ctx", 'c', "N", CLI_INT, AT(ctx), CHAT, CLI_G_LENGTH,
     .min = 16, .max = MOST_TOKENS,
     .help = "Tokens the context holds; then the oldest turns are forgotten (default: no "
             "limit where memory does not grow with them, else the trained length, at most "
             "8192)."},
    {"ctx", 'c', "N", CLI_INT, AT(ctx), SERVE, CLI_G_LENGTH,
     .min = 1, .max = MOST_TOKENS,
     .help = "Longest prompt and answer together (default: the trained length, at most "
             "8192)."},
    {"ctx", 'c', "N", CLI_INT, AT(ctx), LOGPROBS, CLI_G_LENGTH,
     .min = 1, .max = MOST_TOKENS,
     .help = "Tokens the context holds (default: as many as there are ids)."},
    {"ctx", 'c', "N", CLI_INT, AT(ctx), PERPLEXITY, CLI_G_LENGTH,
     .min = 2, .max = MOST_TOKENS,
     .help = "Tokens per window (default: the trained length, at most 2048)."},
    {"ctx", 'c', "N", CLI_INT, AT(ctx), SALIENCY, CLI_G_LENGTH,
     .min = 3, .max = 131072,
     .help = "Tokens of the text to read; time grows with their square (default: "
             "the trained length, at most 2048)."},
    {"ctx", 'c', "N", CLI_INT, AT(ctx), EVAL, CLI_G_LENGTH,
     .min = 16, .max = MOST_TOKENS,
     .help = "The most tokens the model sees; longer items lose their beginning "
             "(default: the trained length)."},
    {"ctx", 'c', "N", CLI_INT, AT(ctx), INSPECT, CLI_G_LENGTH,
     .min = 1, .max = MOST_TOKENS,
     .help = "Context length to state memory for (default: the trained length)."},

    {"grammar", 0, "FILE", CLI_STRING, AT(grammar), SAMPLE, CLI_G_LENGTH,
     .help = "Write only what the grammar in FILE allows (GBNF, docs/grammar.md); - is "
             "standard input."},
    {"json-schema", 0, "FILE", CLI_STRING, AT(json_schema), SAMPLE, CLI_G_LENGTH,
     .help = "Write JSON that is valid for the schema in FILE; - is standard input."},

    /* sampling */
    {"temp", 't', "X", CLI_REAL, AT(temp), GENERATE, CLI_G_SAMPLING, .preset = "0",
     .max = 100, .help = "Temperature; 0 always takes the most likely token."},
    {"temp", 't', "X", CLI_REAL, AT(temp), CHAT, CLI_G_SAMPLING, .preset = "-1",
     .max = 100, .help = "Temperature; 0 always takes the most likely token (default: "
             "what the adapter or the model's generation_config.json says, else "
             "0.4)."},
    {"top-k", 0, "K", CLI_INT, AT(top_k), GENERATE, CLI_G_SAMPLING, .preset = "0",
     .max = MOST_TOKENS, .help = "Sample from the K most likely tokens; 0: off."},
    {"top-k", 0, "K", CLI_INT, AT(top_k), CHAT, CLI_G_SAMPLING, .preset = "-1",
     .max = MOST_TOKENS,
     .help = "Sample from the K most likely tokens; 0: off (default: the model's, else 0)."},
    {"top-p", 0, "P", CLI_REAL, AT(top_p), GENERATE, CLI_G_SAMPLING, .preset = "1",
     .max = 1, .help = "Sample from the fewest tokens whose probabilities add up to P."},
    {"top-p", 0, "P", CLI_REAL, AT(top_p), CHAT, CLI_G_SAMPLING, .preset = "-1",
     .max = 1, .help = "Sample from the fewest tokens whose probabilities add up to P "
             "(default: the model's, else 0.9)."},
    {"min-p", 0, "P", CLI_REAL, AT(min_p), GENERATE, CLI_G_SAMPLING, .preset = "0",
     .max = 1, .help = "Drop tokens less likely than P times the most likely one."},
    {"min-p", 0, "P", CLI_REAL, AT(min_p), CHAT, CLI_G_SAMPLING, .preset = "-1",
     .max = 1, .help = "Drop tokens less likely than P times the most likely one (default: "
             "the model's, else 0)."},
    {"repeat-penalty", 0, "X", CLI_REAL, AT(repeat_penalty), GENERATE, CLI_G_SAMPLING,
     .preset = "1", .min = 0.01, .max = 100,
     .help = "Make recent tokens less likely by factor X; 1: off."},
    {"repeat-penalty", 0, "X", CLI_REAL, AT(repeat_penalty), CHAT, CLI_G_SAMPLING,
     .preset = "-1", .min = 0.01, .max = 100,
     .help = "Make recent tokens less likely by factor X; 1: off (default: the model's; 1 if "
             "it says how to sample without naming one, else 1.1)."},
    {"repeat-last", 0, "N", CLI_INT, AT(repeat_last), GENERATE, CLI_G_SAMPLING,
     .preset = "64", .min = 1, .max = 1048576,
     .help = "How many recent tokens the penalty looks at."},
    {"repeat-last", 0, "N", CLI_INT, AT(repeat_last), CHAT, CLI_G_SAMPLING,
     .preset = "-1", .min = 1, .max = 1048576,
     .help = "How many recent tokens the penalty looks at (default: the model's, else 64)."},
    {"seed", 's', "N", CLI_SEED, AT(seed), SALIENCY | ALLOCATE, CLI_G_METHOD, .preset = "0",
     .help = "Seed of the random score; of allocate also of its probes."},
    {"seed", 's', "N", CLI_SEED, AT(seed), SERVE, CLI_G_METHOD, .preset = "0",
     .help = "Seed of the random score. Requests bring seeds of their own."},
    {"seed", 's', "N", CLI_SEED, AT(seed), (RUN & ~(EVAL | SERVE)) | LINEARIZE,
     CLI_G_SAMPLING, .preset = "0",
     .help = "Seed of every random choice: the same seed gives the same result; -1 draws one "
             "and says which."},

    /* download */
    {"endpoint", 0, "URL", CLI_STRING, AT(endpoint), PULL | RUN_NAME, CLI_G_DOWNLOAD,
     .help = "Hub to ask (default: $HF_ENDPOINT, else https://huggingface.co)."},
    {"revision", 0, "REV", CLI_STRING, AT(revision), PULL | RUN_NAME, CLI_G_DOWNLOAD,
     .preset = "main", .help = "Branch, tag or commit."},
    {"include", 0, "GLOB", CLI_STRINGS, AT(include), PULL, CLI_G_DOWNLOAD,
     .help = "Download only the files that match, such as '*.json'; may be repeated "
             "(default: configuration, tokenizer and safetensors, or one GGUF model)."},
    {"token-file", 0, "FILE", CLI_STRING, AT(token_file), PULL | RUN_NAME, CLI_G_DOWNLOAD,
     .help = "File with the access token (default: $HF_TOKEN, else the file that `hf auth "
             "login` writes, $HF_HOME/token). It is sent to the "
             "endpoint's host only, and only over https://, or http:// to this machine."},
    {"insecure-token", 0, NULL, CLI_FLAG, AT(insecure_token), PULL | RUN_NAME, CLI_G_DOWNLOAD,
     .help = "Send the token also over http:// to another machine, where everyone on the "
             "way can read it."},
    {"timeout", 0, "S", CLI_INT, AT(timeout), PULL | RUN_NAME | PULL_DATA, CLI_G_DOWNLOAD, .preset = "30",
     .min = 1, .max = 3600, .help = "Retry after this many seconds without data."},
    {"offline", 0, NULL, CLI_FLAG, AT(offline), PULL | RUN_NAME | PULL_DATA, CLI_G_DOWNLOAD,
     .help = "Never use the network: fail if something is missing (also HF_HUB_OFFLINE=1)."},
    {"force", 0, NULL, CLI_FLAG, AT(force), PULL, CLI_G_DOWNLOAD,
     .help = "Verify the checksums of files already in the cache, and replace bad ones."},
    {"force", 0, NULL, CLI_FLAG, AT(force), PULL_DATA, CLI_G_DOWNLOAD,
     .help = "Download and convert also what is here."},
    {"all", 'a', NULL, CLI_FLAG, AT(all), PULL_DATA, CLI_G_DOWNLOAD,
     .help = "Every set of the list."},
    {"list", 'l', NULL, CLI_FLAG, AT(list), PULL_DATA, CLI_G_DOWNLOAD,
     .help = "Only show the sets: what they are, origin, size, licence, the files they make."},
    {"mirror", 0, "URL|FILE", CLI_STRING, AT(mirror), PULL_DATA, CLI_G_DOWNLOAD,
     .help = "Where to download from instead: an address (https://...) under which all "
             "published files lie by their names, or a file with a list of sources of its "
             "own, in the form of share/still/data-sources.json, which may have checksums."},
    {"out", 'o', "DIR", CLI_STRING, AT(out), PULL_DATA, CLI_G_DOWNLOAD,
     .help = "Where to put the files (default: ~/.cache/still/data)."},
    {"keep", 0, NULL, CLI_FLAG, AT(keep), PULL_DATA, CLI_G_DOWNLOAD,
     .help = "Keep the published files, in published/ of the folder."},

    /* training */
    {"data", 0, "FILE[@W]", CLI_STRINGS, AT(data), LINEARIZE, CLI_G_TRAINING,
     .help = "Training text: JSON or JSON lines, gzipped or not, with instruction, input "
             "and output, or with text; or a data set that pull-data brought, such as "
             "books. May be repeated; W is a file's share of the sequences (default: by "
             "size)."},
    {"out", 'o', "DIR", CLI_STRING, AT(out), LINEARIZE, CLI_G_TRAINING,
     .help = "Folder to write: a MODEL for every other command. It must not exist, "
             "except with --resume."},
    {"stage", 0, "1|2|both", CLI_CHOICE, AT(stage), LINEARIZE, CLI_G_TRAINING,
     .preset = "both", .choices = "1 2 both",
     .help = "1: attention transfer, each layer learns the teacher's attention outputs. "
             "2: low-rank linearization, next-token loss end to end."},
    {"tokens", 'n', "N", CLI_INT, AT(tokens), LINEARIZE, CLI_G_TRAINING,
     .preset = "20000000", .min = 1, .max = 1e15, .help = "Tokens to train on in each stage."},
    {"seq", 0, "N", CLI_INT, AT(seq), LINEARIZE, CLI_G_TRAINING, .preset = "1024",
     .min = 2, .max = 1048576,
     .help = "Tokens per sequence; longer ones train long-range recall."},
    {"batch", 'b', "N", CLI_INT, AT(batch), LINEARIZE, CLI_G_TRAINING, .preset = "8",
     .min = 1, .max = 65536,
     .help = "Sequences per optimizer step, over all machines; gradients are "
             "accumulated."},
    {"micro", 0, "N", CLI_INT, AT(micro_batch), LINEARIZE, CLI_G_TRAINING, .preset = "1",
     .min = 1, .max = 65536, .help = "Sequences computed at once; memory grows with it."},
    {"resume", 0, NULL, CLI_FLAG, AT(resume), LINEARIZE, CLI_G_TRAINING,
     .help = "Continue from the last checkpoint in --out. The result is, bit for bit, that "
             "of an uninterrupted run."},
    {"dry-run", 0, NULL, CLI_FLAG, AT(dry_run), LINEARIZE, CLI_G_TRAINING,
     .help = "Measure one sequence of each stage and print time and memory; train "
             "nothing."},
    {"start", 0, "ADAPTER", CLI_STRING, AT(start), LINEARIZE, CLI_G_TRAINING,
     .help = "Start from this adapter's parameters, for instance stage 2 after a separate "
             "stage 1."},
    {"lr1", 0, "X", CLI_REAL, AT(lr1), LINEARIZE, CLI_G_TRAINING, .preset = "0.01",
     .min = 1e-12, .max = 10, .help = "Peak learning rate of stage 1."},
    {"lr2", 0, "X", CLI_REAL, AT(lr2), LINEARIZE, CLI_G_TRAINING, .preset = "0.0005",
     .min = 1e-12, .max = 10, .help = "Peak learning rate of stage 2."},
    {"lr-scale", 0, "GROUP=X", CLI_STRINGS, AT(lr_scale), LINEARIZE, CLI_G_TRAINING,
     .help = "Multiply the rate of a group: maps, scalars (alpha, window factors), gate "
             "or lora; 0 freezes it. May be repeated."},
    {"warmup", 0, "P", CLI_REAL, AT(warmup), LINEARIZE, CLI_G_TRAINING,
     .preset = "0.05", .min = 1e-9, .max = 1,
     .help = "Share of the steps in which the learning rate rises; then it follows a cosine "
             "down to a tenth."},
    {"clip", 0, "X", CLI_REAL, AT(clip), LINEARIZE, CLI_G_TRAINING, .preset = "1",
     .min = 1e-9, .max = 1e9, .help = "Clip the gradient to this norm."},
    {"decay", 0, "X", CLI_REAL, AT(decay), LINEARIZE, CLI_G_TRAINING, .preset = "0",
     .max = 1, .help = "Weight decay."},
    {"loss", 0, "KIND", CLI_CHOICE, AT(loss), LINEARIZE, CLI_G_TRAINING,
     .preset = "outputs", .choices = "outputs weights",
     .help = "Stage 1: squared error of attention outputs, or cross entropy of attention "
             "weights."},
    {"kd", 0, "W", CLI_REAL, AT(kd), LINEARIZE, CLI_G_TRAINING, .preset = "0",
     .max = 1000,
     .help = "Stage 2: add W times the divergence from the teacher's predictions."},
    {"cap-share", 0, "P", CLI_REAL, AT(cap_share), LINEARIZE, CLI_G_TRAINING,
     .preset = "0", .max = 1,
     .help = "Heads that may keep more than others (--cap, --budget) train with this share "
             "of their tokens and have all of them afterwards: with little room they learn "
             "to rely on what is kept (default: an eighth with --budget, else 1)."},
    {"mask-prompt", 0, NULL, CLI_FLAG, AT(mask_prompt), LINEARIZE, CLI_G_TRAINING,
     .help = "Stage 2: exclude prompts from the loss; only outputs count."},
    {"freeze-maps", 0, NULL, CLI_FLAG, AT(freeze_maps), LINEARIZE, CLI_G_TRAINING,
     .help = "Stage 2: train only the LoRA parameters."},
    {"lora-rank", 0, "R", CLI_INT, AT(lora_rank), LINEARIZE, CLI_G_TRAINING,
     .preset = "8", .min = 1, .max = 1024, .help = "Rank of the LoRA of stage 2."},
    {"lora-alpha", 0, "X", CLI_REAL, AT(lora_alpha), LINEARIZE, CLI_G_TRAINING,
     .preset = "16", .min = 1e-6, .max = 1e6,
     .help = "Scale of LoRA: its output is multiplied by X / rank."},
    {"lora-dropout", 0, "P", CLI_REAL, AT(lora_dropout), LINEARIZE, CLI_G_TRAINING,
     .preset = "0", .max = 0.99, .help = "Dropout on the inputs of LoRA."},
    {"lora-targets", 0, "LIST", CLI_STRING, AT(lora_targets), LINEARIZE, CLI_G_TRAINING,
     .preset = "q,k,v,o,gate", .help = "Projections that get LoRA."},
    {"held-out", 0, "P", CLI_REAL, AT(held_out), LINEARIZE, CLI_G_TRAINING,
     .preset = "0.02", .max = 0.9,
     .help = "Share of the sequences kept for validation."},
    {"validate-every", 0, "N", CLI_INT, AT(validate_every), LINEARIZE, CLI_G_TRAINING,
     .max = 1e12, .help = "Steps between validations (default: ten times a stage)."},
    {"save-every", 0, "N", CLI_INT, AT(save_every), LINEARIZE, CLI_G_TRAINING,
     .max = 1e12, .help = "Steps between checkpoints (default: one about every two minutes)."},

    /* export */
    {"to", 0, "FORMAT", CLI_CHOICE, AT(to), EXPORT, CLI_G_EXPORT,
     .choices = "gguf safetensors peft adapter",
     .help = "gguf: a file for llama.cpp. safetensors: a Hugging Face folder. "
             "peft: the LoRA part alone, for PEFT. adapter: what linearize wrote, at a "
             "third of the size, for still."},
    {"out", 'o', "PATH", CLI_STRING, AT(out), EXPORT, CLI_G_EXPORT,
     .writes = CLI_WRITES_NEW,
     .help = "Path to write: NAME.gguf, or a folder. It must not exist."},
    {"dtype", 0, "TYPE", CLI_CHOICE, AT(dtype), EXPORT, CLI_G_EXPORT,
     .choices = "f32 f16 bf16 q8_0 same",
     .help = "Type of the matrices. safetensors: f32, f16 or bf16 (default: the model's "
             "own, bf16 if it is quantized). gguf: also q8_0, or same, the model's own "
             "(default: a quantized model keeps its blocks, with q8_0 where the merge "
             "changed them; others f16). adapter: q8_0 for gates and f16 for the rest "
             "(default), or f16 or f32 for all."},
    {"base-name", 0, "NAME", CLI_STRING, AT(base_name), EXPORT, CLI_G_EXPORT,
     .help = "peft: name or path of the base model in the Hugging Face format; adapter: "
             "name or path of the base model (default: the name in the adapter)."},

    /* server */
    {"host", 0, "HOST", CLI_STRING, AT(host), SERVE, CLI_G_SERVER,
     .preset = "127.0.0.1",
     .help = "Address to listen on; 0.0.0.0 admits other machines."},
    {"port", 0, "PORT", CLI_INT, AT(port), SERVE, CLI_G_SERVER, .preset = "8080",
     .max = 65535, .help = "Port to listen on; 0 takes a free one and prints it."},
    {"api-key-file", 0, "FILE", CLI_STRING, AT(api_key_file), SERVE, CLI_G_SERVER,
     .help = "Answer only requests with a key in FILE, which has one a line "
             "(Authorization: Bearer KEY)."},
    {"cors", 0, "ORIGIN", CLI_STRINGS, AT(cors), SERVE, CLI_G_SERVER,
     .help = "Let web pages of this origin use the server, such as https://example.org; * "
             "is all of them. May be given up to 16 times."},
    {"parallel", 0, "N", CLI_INT, AT(parallel), SERVE, CLI_G_SERVER, .max = 65536,
     .help = "Conversations that are computed at once; each has a session of its own "
             "(default: 16, with a GPU 128, or as many as fit)."},
    {"memory", 0, "BYTES", CLI_BYTES, AT(memory), SERVE, CLI_G_SERVER,
     .help = "Most memory for the model, its sessions and what is kept of prompts: 6GB "
             "(default: half of what is free)."},
    {"prefix-cache", 0, "BYTES", CLI_BYTES, AT(prefix_cache), SERVE, CLI_G_SERVER,
     .help = "Memory for what is kept of earlier prompts and answers, so that texts that "
             "begin alike are computed once; 0: none (default: what is left, at most "
             "2 GiB)."},
    {"cache-dir", 0, "DIR", CLI_STRING, AT(cache_dir), SERVE, CLI_G_SERVER,
     .help = "Folder for what the prefix cache has no room for, and for all of it at the "
             "end; it is found again after a restart."},
    {"queue", 0, "N", CLI_INT, AT(queue), SERVE, CLI_G_SERVER, .preset = "64",
     .max = 65536,
     .help = "Requests that may wait for a place; others are told to come back later "
             "(429)."},
    {"max-tokens", 0, "N", CLI_INT, AT(most_tokens), SERVE, CLI_G_SERVER,
     .max = MOST_TOKENS,
     .help = "Most tokens of an answer, whatever a request asks for (default: as many as "
             "the context holds)."},
    {"connections", 0, "N", CLI_INT, AT(connections), SERVE, CLI_G_SERVER,
     .preset = "1024", .min = 1, .max = 65536,
     .help = "Connections that may be open at once."},
    {"drain", 0, "SECONDS", CLI_INT, AT(drain), SERVE, CLI_G_SERVER, .preset = "50",
     .max = 86400,
     .help = "How long requests in progress may go on after Ctrl-C or SIGTERM; then they are "
             "cancelled. A second signal ends everything at once."},
    {"log", 0, "FILE", CLI_STRING, AT(log), SERVE, CLI_G_SERVER,
     .help = "Append a line of JSON for each request to FILE: when, from where, path, "
             "status, time, tokens; nothing of prompts and answers. - is standard "
             "output."},

    /* eval */
    {"tasks", 't', "LIST", CLI_STRING, AT(tasks), EVAL, CLI_G_EVAL,
     .help = "Tasks, separated by commas. A name selects all tasks that begin with it and _: "
             "niah, babilong_qa, arc. NAME@512+1K sets a task's own lengths, NAME=100 its "
             "limit. Without this option, the tasks are listed."},
    {"data", 'd', "DIR", CLI_STRING, AT(data_dir), EVAL, CLI_G_EVAL,
     .help = "Folder with the tasks' files (default: where pull-data puts them)."},
    {"limit", 'l', "N", CLI_INT, AT(limit), EVAL, CLI_G_EVAL, .max = 1e12,
     .help = "Evaluate only the first N items of each task."},
    {"lengths", 0, "LIST", CLI_STRING, AT(lengths), EVAL, CLI_G_EVAL,
     .help = "Lengths in tokens, for tasks that have lengths: 512,1024 or 1K,4K (default: "
             "the task's own)."},
    {"samples", 0, "N", CLI_INT, AT(samples), EVAL, CLI_G_EVAL, .max = 1e6,
     .help = "Samples per generated task and length (default: the task's own number)."},
    {"seed", 's', "N", CLI_SEED, AT(seed), EVAL, CLI_G_EVAL, .preset = "42",
     .help = "Seed of generated tasks, and of the random score."},
    {"shots", 0, "N", CLI_INT, AT(shots), EVAL, CLI_G_EVAL, .preset = "-1", .min = -1,
     .max = 100,
     .help = "Worked examples before each question (default: the task's own number; -1 "
             "means the default)."},
    {"against", 0, "LIST", CLI_STRING, AT(against), EVAL, CLI_G_EVAL,
     .help = "Also run each model with these attention methods, side by side: "
             "softmax,lolcats,swa."},
    {"freeze", 0, "DIR", CLI_STRING, AT(freeze), EVAL, CLI_G_EVAL,
     .help = "Run no model: write the samples of generated tasks to DIR/TASK-LENGTH.jsonl, "
             "with seed and checksum. --data DIR then uses exactly these samples."},
    {"no-fork", 0, NULL, CLI_FLAG, AT(no_fork), EVAL, CLI_G_EVAL,
     .help = "Compute every choice from its first token instead of sharing prefixes: "
             "slower, with the same figures."},
    {"log", 0, "FILE", CLI_STRING, AT(log), EVAL, CLI_G_EVAL,
     .help = "Append a line of JSON per item to FILE. Items of the same run that it already "
             "has are not computed again."},

    /* bench */
    {"shape", 0, "NAME", CLI_STRING, AT(shape), BENCH, CLI_G_BENCH,
     .help = "Instead of MODEL, random f16 weights of a published shape: llama3.1-8b, "
             "llama3.2-1b, mistral-7b, smollm2-135m and others (an unknown name lists "
             "them)."},
    {"lengths", 0, "LIST", CLI_STRING, AT(lengths), BENCH, CLI_G_BENCH,
     .help = "Tokens of the prompt (prefill), in the context (decode), of a sequence "
             "(train): 512,1K,4K (default: 1K,2K,4K,8K,16K,32K,64K; train: 1K)."},
    {"batch", 'b', "B", CLI_INT, AT(batch), BENCH, CLI_G_BENCH, .min = 1, .max = 65536,
     .help = "Sequences decoded together, or per training step (default: decode 12, "
             "others 1)."},
    {"against", 0, "LIST", CLI_STRING, AT(against), BENCH, CLI_G_BENCH,
     .help = "Methods to measure beside --method, taking turns in one run: "
             "softmax,lolcats,swa (default: softmax,lolcats; none for train and for a "
             "model that linearize made, which runs only its own method)."},
    {"rounds", 0, "N", CLI_INT, AT(rounds), BENCH, CLI_G_BENCH, .preset = "3", .min = 1,
     .max = 64, .help = "Times to measure each point; the median counts."},
    {"steps", 'n', "N", CLI_INT, AT(steps), BENCH, CLI_G_BENCH, .max = 65536,
     .help = "Steps timed per round (default: decode 32, train 2)."},
    {"batch-rows", 0, "N", CLI_INT, AT(batch_rows), BENCH, CLI_G_BENCH, .max = 1048576,
     .help = "Tokens of a prompt computed at once (default: the backend's own, 512 on "
             "cpu)."},
    {"seed", 's', "N", CLI_SEED, AT(seed), BENCH, CLI_G_BENCH, .preset = "0",
     .help = "Seed of random ids and pasts, and of the random score."},
    {"micro", 0, "N", CLI_INT, AT(micro_batch), BENCH, CLI_G_BENCH, .preset = "1", .min = 1,
     .max = 65536, .help = "Train: sequences computed at once; memory grows with it."},

    /* attention method */
    {"method", 0, "NAME", CLI_CHOICE, AT(method), METHOD, CLI_G_METHOD,
     .choices = "softmax still lolcats hedgehog t2r swa liger supra",
     .help = "How layers remember the past. softmax: the model's own attention, which keeps "
             "every token. still: exact attention for a window and the salient tokens, a "
             "linear state for the rest, so memory is constant. lolcats, hedgehog, t2r, "
             "liger, supra: linear attention from other papers. swa: a sliding window "
             "alone. All run without training."},
    {"chunk", 0, "C", CLI_INT, AT(chunk), METHOD, CLI_G_METHOD,
     .min = 1, .max = 1048576,
     .help = "Tokens per chunk; the window is the current chunk and the one before it "
             "(default: 128; lolcats, liger: 64)."},
    {"select", 0, "L", CLI_INT, AT(select), METHOD, CLI_G_METHOD,
     .preset = "-1", .min = -1, .max = 1048576,
     .help = "Tokens of a chunk that stay exact when it leaves the window (default: a "
             "quarter of the chunk, all of them where heads are allocated; -1 means the "
             "default)."},
    {"cap", 0, "M|none", CLI_STRING, AT(cap), METHOD & ~ALLOCATE, CLI_G_METHOD,
     .help = "Most exact tokens kept beyond the window (default: two chunks). The budget "
             "is 2C + M; with none it grows with the text. Layers, and kv heads "
             "of a layer, may differ: 96,17-18:768,23/0:3840 keeps 768 in layers 17 and 18, "
             "3840 in kv head 0 of layer 23, and 96 everywhere else."},
    {"budget", 0, "BYTES", CLI_BYTES, AT(budget), METHOD & ~SALIENCY, CLI_G_METHOD,
     .help = "Memory of a session, such as 18MB or 12MiB. Probes tell which heads look things "
             "up, and the caps are chosen so that a session fits (default: what the method "
             "takes with the same cap for all, an adapter with its own; linearize: no "
             "probes). A small one also halves the chunks."},
    {"no-allocate", 0, NULL, CLI_FLAG, AT(no_allocate), RUN | INSPECT | BENCH, CLI_G_METHOD,
     .help = "still without an adapter: no probes, but the paper's settings, with the same "
             "cap for every head. Without this option, and without --cap, the first use "
             "finds the heads that look things up, in about a minute, gives them most of "
             "the memory, and keeps what it found in the cache."},
    {"probes", 0, "N", CLI_INT, AT(probes), METHOD & ~SALIENCY, CLI_G_METHOD, .preset = "24",
     .min = 1, .max = 4096,
     .help = "Prompts that hide a fact and ask for it, about 1200 tokens each."},
    {"cache-type-k", 0, "TYPE", CLI_CHOICE, AT(cache_type_k), METHOD, CLI_G_METHOD,
     .choices = "f16 q8 q5",
     .help = "Keys of the exact tokens kept beyond the window (--cap), and of nothing else: "
             "in 8 or 5 bits, in groups of 32 with a scale; f16: as --cache says (default: "
             "what the adapter was trained for, else f16). A token is quantized once, when "
             "it leaves the window. With heads of 64, q8 and q4 take 108 bytes a token "
             "instead of 256, q5 and q3 76."},
    {"cache-type-v", 0, "TYPE", CLI_CHOICE, AT(cache_type_v), METHOD, CLI_G_METHOD,
     .choices = "f16 q4 q3",
     .help = "The same for their values: in 4 or 3 bits, in groups of 32 with a scale and a "
             "minimum."},
    {"score", 0, "NAME", CLI_CHOICE, AT(score), METHOD, CLI_G_METHOD,
     .choices = "s3 distinct received keynorm random",
     .help = "What makes a token salient. s3: the Self-Saliency Score (default); distinct: a "
             "key unlike the others of its chunk, as in KeyDiff (default where heads are "
             "allocated); received: the attention that the window gave it; keynorm: a small norm "
             "of its key; random."},
    {"heads", 0, "MODE", CLI_CHOICE, AT(heads), METHOD, CLI_G_METHOD,
     .choices = "shared per-head",
     .help = "shared: the query heads of a group select together and share a state; "
             "per-head: each has its own, as in the paper."},
    {"la-scale", 0, "MODE", CLI_CHOICE, AT(la_scale), METHOD, CLI_G_METHOD,
     .choices = "exact window",
     .help = "Weight of the linear term. exact: one denominator for all terms; window: "
             "relative to the largest logit, as in LoLCATs."},
    {"gate", 0, "KIND", CLI_CHOICE, AT(gate), METHOD, CLI_G_METHOD, .choices = "full none",
     .help = "Gate on the linear term. full: a matrix a layer, as in the paper; none "
             "(default: full, none with linearize --budget and where heads are "
             "allocated)."},
    {"plain-map", 0, NULL, CLI_FLAG, AT(plain_map), METHOD, CLI_G_METHOD,
     .help = "Ablation: feature map without norm preservation."},
    {"layers", 0, "A-B", CLI_STRING, AT(layers), METHOD, CLI_G_METHOD,
     .help = "Layers that use the method, counted from 0; the others stay softmax "
             "(default: all)."},
    {"state", 0, "MODE", CLI_CHOICE, AT(state), METHOD & ~(LINEARIZE | SALIENCY), CLI_G_METHOD,
     .choices = "linear none",
     .help = "linear: what is not kept exact is folded into a linear state; none: it is "
             "forgotten (default: linear, none where heads are allocated: a state that "
             "nothing trained is no help, and its memory holds more tokens)."},
    {"positions", 0, "MODE", CLI_CHOICE, AT(positions), RUN | INSPECT | BENCH,
     CLI_G_METHOD,
     .preset = "auto", .choices = "auto absolute capped",
     .help = "absolute: true distances; capped: no key appears farther away than the "
             "trained length; auto: capped if the context is longer than that."},
    {"rollback", 0, "R", CLI_INT, AT(rollback), CHAT | INSPECT, CLI_G_METHOD,
     .preset = "0", .max = 4096,
     .help = "Keep the state at the last R chunk boundaries, at the cost of R states of "
             "memory. Folding a token into the state cannot be undone, so going back "
             "otherwise reads the conversation again, except to before the last message, "
             "which chat always keeps. softmax needs none."},
    {"rollback", 0, "R", CLI_INT, AT(rollback), SERVE, CLI_G_METHOD,
     .preset = "4", .max = 4096,
     .help = "Keep the state at the last R chunk boundaries, so that requests can share "
             "a prefix. softmax needs none."},
    {"load-state", 0, "FILE", CLI_STRING, AT(load_state), GENERATE, CLI_G_METHOD,
     .help = "Start from a saved session; the prompt continues it."},
    {"save-state", 0, "FILE", CLI_STRING, AT(save_state), GENERATE, CLI_G_METHOD,
     .writes = CLI_WRITES_FILE,
     .help = "Save the session after the prompt, before the reply, so that a long prompt "
             "is read only once."},

    /* computing */
    {"lookup", 0, "N|off", CLI_STRING, AT(lookup), SAMPLE, CLI_G_COMPUTE,
     .help = "Guess up to N tokens (1 to 31) from what followed the same words earlier in "
             "the conversation, and compute them together with the next one: faster where a "
             "text repeats itself or its prompt, and the same text either way. Guesses that "
             "do not pay are not made, and fewer than 4 at a time seldom do; on a GPU none are "
             "made (default: 15)."},
    {"backend", 0, "NAME", CLI_CHOICE, AT(backend), METHOD | SELFTEST,
     CLI_G_COMPUTE, .preset = "cpu", .choices = "cpu cuda ref bf16",
     .help = "cpu: fast on any machine; cuda: an NVIDIA GPU (sm_80 or later), if still was "
             "built with CUDA; ref: the plain specification, slow and exact; bf16: softmax "
             "attention rounded to bfloat16 as frameworks do, to compare with published "
             "scores."},
    {"threads", 'j', "N", CLI_INT, AT(threads), METHOD | SELFTEST, CLI_G_COMPUTE,
     .min = 1, .max = 1024, .help = "Most threads to use, no more than processors (default: one per core). "
                              "Fewer work while other programs keep cores busy."},
    {"no-merge", 0, NULL, CLI_FLAG, AT(no_merge), RUN | SALIENCY | INSPECT | BENCH,
     CLI_G_COMPUTE,
     .help = "Keep the LoRA part of an adapter apart, at its full precision. Without this "
             "option it is merged into the weights when the model is opened, in their own "
             "type if they are floats, else in 8 bits, and takes no time in a step."},
    {"isa", 0, "NAME", CLI_CHOICE, AT(isa), METHOD | SELFTEST, CLI_G_COMPUTE,
     .choices = "amx avx512 avx2 portable",
     .help = "Instruction set of the cpu backend: amx, avx512, avx2 or portable (default: "
             "the best this machine has)."},
    {"gpu-memory", 0, "BYTES", CLI_BYTES, AT(gpu_memory), METHOD, CLI_G_COMPUTE,
     .help = "Most memory of the GPU that weights, sessions and scratch take together, "
             "such as 11GB (default: all there is). Prompts are computed in smaller pieces "
             "where that makes them fit."},
    {"cache", 0, "TYPE", CLI_CHOICE, AT(cache), RUN | INSPECT | BENCH,
     CLI_G_COMPUTE,
     .choices = "f16 f32",
     .help = "Type of stored keys and values (default: f16; f32 on ref and for models "
             "stored in f32)."},
    {"batch", 'b', "N", CLI_INT, AT(batch), EVAL, CLI_G_COMPUTE, .min = 1,
     .max = 65536,
     .help = "Tokens computed at once; more is faster and takes more memory (default: 256, "
             "8192 on a GPU)."},
    {"batch", 'b', "N", CLI_INT, AT(batch), (RUN & ~EVAL) | INSPECT, CLI_G_COMPUTE,
     .preset = "512", .min = 1, .max = 65536,
     .help = "Tokens of a prompt computed at once; more is faster and takes more memory."},

    /* output */
    {"names", 0, NULL, CLI_FLAG, AT(names), LIST, CLI_G_OUTPUT,
     .help = "Only the names, one a line."},
    {"yes", 'y', NULL, CLI_FLAG, AT(yes), RM, CLI_G_OUTPUT,
     .help = "Do not ask."},
    {"tensors", 0, NULL, CLI_FLAG, AT(tensors), INSPECT, CLI_G_OUTPUT,
     .help = "List every tensor with type, shape and size."},
    {"out", 'o', "FILE", CLI_STRING, AT(out), SALIENCY, CLI_G_OUTPUT,
     .writes = CLI_WRITES_TEXT,
     .help = "Also write a report to FILE, a self-contained HTML page: tokens coloured by "
             "score, for every layer and head, with those that stay exact underlined; - is "
             "standard output, instead of the table."},
    {"figures", 0, "DIR", CLI_STRING, AT(figures), SALIENCY, CLI_G_OUTPUT,
     .writes = CLI_WRITES_FOLDER,
     .help = "Also draw figures into the folder DIR as SVG: scores.svg, local against global; "
             "words.svg, the tokens most often kept (words.tsv as a table); captured.svg, "
             "attention on the tokens kept, by how many are, for every score; places.svg, "
             "where each token is over time."},
    {"by-position", 0, "N", CLI_INT, AT(by_position), PERPLEXITY, CLI_G_OUTPUT,
     .max = 4096,
     .help = "Also show the perplexity of N equal parts of the window, which tells whether "
             "the model still uses what lies far back."},
    {"csv", 0, "FILE", CLI_STRING, AT(csv), BENCH, CLI_G_OUTPUT,
     .writes = CLI_WRITES_TEXT,
     .help = "Also write every figure to FILE as CSV, one line per point; - is standard "
             "output, instead of the table."},
    {"svg", 0, "FILE", CLI_STRING, AT(svg), BENCH, CLI_G_OUTPUT, .writes = CLI_WRITES_TEXT,
     .help = "Also draw time and memory by length to FILE, one line per method; bars reach from "
             "the fastest round to the slowest; - is standard output, instead of the table."},
    {"svg", 0, "FILE", CLI_STRING, AT(svg), ALLOCATE, CLI_G_OUTPUT,
     .writes = CLI_WRITES_TEXT,
     .help = "Also draw heads and caps to FILE: layers across, kv heads down; - is standard "
             "output, instead of the text."},
    {"echo", 0, NULL, CLI_FLAG, AT(echo), GENERATE, CLI_G_OUTPUT,
     .help = "Write the prompt before its continuation."},
    {"markdown", 0, NULL, CLI_FLAG, AT(markdown), HELP, CLI_G_OUTPUT,
     .help = "All commands and options as Markdown (docs/cli.md)."},
    {"man", 0, NULL, CLI_FLAG, AT(man), HELP, CLI_G_OUTPUT,
     .help = "The manual page still(1), or with COMMAND that of the command, as roff."},
    {"json", 0, NULL, CLI_FLAG, AT(json), ALL & ~(HELP | COMPLETION), CLI_G_OUTPUT,
     .help = "Write JSON instead of text, one object per line."},
    {"watch", 0, NULL, CLI_FLAG, AT(watch), LINEARIZE, CLI_G_OUTPUT,
     .help = "On a terminal: curves of loss and error, also by layer, beneath the progress "
             "bar."},
    {"quiet", 'q', NULL, CLI_FLAG, AT(quiet),
     PULL | RUN | LINEARIZE | EXPORT | PULL_DATA | BENCH | SALIENCY | ALLOCATE,
     CLI_G_OUTPUT,
     .help = "No progress and no figures on standard error."},
    {"help", 'h', NULL, CLI_FLAG, AT(help), ALL, CLI_G_OUTPUT,
     .help = "Explain this command."},
    {.name = NULL},
};

const char *const cli_alias_table[][2] = {
    {"temperature", "temp"},
    {"max-tokens", "n-predict"},
    {"max-new-tokens", "n-predict"},
    {"predict", "n-predict"},
    {"ctx-size", "ctx"},
    {"context", "ctx"},
    {"repetition-penalty", "repeat-penalty"},
    {"repeat-last-n", "repeat-last"},
    {"system-prompt", "system"},
    {"device", "backend"},
    {"batch-size", "batch"},
    {"output", "out"},
    {"plot", "svg"},
    {NULL, NULL},
};
/* clang-format on */
