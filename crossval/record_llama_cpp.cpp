// Records a run of llama.cpp as a trace, through its eval callback: paste `Recorder` into your program, or build this one.
//
//     g++ -O1 record_llama_cpp.cpp -I LLAMA/include -I LLAMA/ggml/include -L LLAMA/build/bin -lllama -lggml -lggml-base
//     ./a.out model.gguf run.safetensors 1,17,5 && bitnet-ref crossval trace model.gguf run.safetensors
//     ./a.out model.gguf run.safetensors 1,17,5,9 2,1,1     two tokens in the first call, then one in each
//
// Built and run with the llama.cpp of llama-cpp-python 0.3.36, which names the tensors of its graph (attn_norm-0, Qcur-0).
// Flash attention is off and the cache is float32, because both round differently. Tensors are copied from any device.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"
#include "trace.h"

struct Recorder {
    struct Tensor {
        int64_t depth, rows, columns;
        std::vector<float> values;
    };
    int n_tokens = 0;
    int heads[2] = {0, 0};     // query and kv heads, if RoPE rotates neighbours (the architecture llama): q and k are
                               // then put back into the order of halves
    bool in_one_call = true;   // attention patterns of a later call have the cache's slots as columns: left out
    std::map<std::string, Tensor> now;   // of this call; the last of a name counts: a bias comes after its product
    std::map<std::string, Tensor> seen;  // of all calls

    // llama_context_params.cb_eval = Recorder::callback, .cb_eval_user_data = &recorder
    static bool callback(struct ggml_tensor *tensor, bool ask, void *user) {
        Recorder &self = *(Recorder *)user;
        std::string name = self.name_of(tensor);
        if (!ask && !name.empty()) self.keep(name, tensor);
        return !ask || !name.empty();
    }

    std::string name_of(const struct ggml_tensor *tensor) const {
        static const std::map<std::string, std::string> whole = {
            {"embd", "hook_embed"}, {"inp_embd", "hook_embed"}, {"result_norm", "ln_final.hook_normalized"},
            {"result_output", "lm_head.hook_out"}, {"inp_scaled", "hook_embed_scaled"},
        };
        static const std::map<std::string, std::string> block = {
            {"attn_norm", "ln1.hook_normalized"}, {"Qcur", "attn.q_proj.hook_out"}, {"Kcur", "attn.k_proj.hook_out"},
            {"Vcur", "attn.v_proj.hook_out"}, {"Qcur ROPE", "attn.hook_rot_q"}, {"Kcur ROPE", "attn.hook_rot_k"},
            {"kq_soft_max", "attn.hook_pattern"}, {"kqv_out", "attn.hook_z"},
            {"attn_sub_norm", "attn.sub_norm.hook_normalized"}, {"attn_out", "attn.o_proj.hook_out"},
            {"attn_o_out", "attn.o_proj.hook_out"}, {"ffn_inp", "hook_resid_mid"}, {"ffn_norm", "ln2.hook_normalized"},
            {"ffn_gate", "mlp.gate_proj.hook_out"}, {"ffn_gate_b", "mlp.gate_proj.hook_out"},
            {"ffn_up", "mlp.up_proj.hook_out"}, {"ffn_up_b", "mlp.up_proj.hook_out"}, {"ffn_swiglu", "mlp.hook_post"},
            {"ffn_sub_out", "mlp.hook_post"}, {"ffn_sub_norm", "mlp.sub_norm.hook_normalized"},
            {"ffn_out", "mlp.down_proj.hook_out"}, {"ffn_down", "mlp.down_proj.hook_out"}, {"l_out", "hook_resid_post"},
            {"Qcur_normed", "attn.q_norm.hook_normalized"}, {"Kcur_normed", "attn.k_norm.hook_normalized"},
            {"attn_post_norm", "ln1_post.hook_normalized"}, {"ffn_post_norm", "ln2_post.hook_normalized"},
            {"sa_out", "hook_resid_mid"},
        };
        std::string given = ggml_get_name(tensor), op = ggml_op_desc(tensor);
        if (tensor->type != GGML_TYPE_F32 || !ggml_is_contiguous(tensor)) return "";
        if (auto known = whole.find(given); known != whole.end()) return known->second;
        size_t dash = given.rfind('-');
        if (dash == std::string::npos || op == "RESHAPE" || op == "VIEW" || op == "PERMUTE" || op == "TRANSPOSE") return "";
        if (op == "SCALE" && given.substr(0, dash) == "Qcur") return "";  // some graphs scale q after RoPE
        auto known = block.find(given.substr(0, dash) + (op == "ROPE" ? " ROPE" : ""));
        return known == block.end() ? "" : "blocks." + given.substr(dash + 1) + "." + known->second;
    }

    static bool ends_with(const std::string &name, const char *end) {
        std::string tail = end;
        return name.size() >= tail.size() && name.compare(name.size() - tail.size(), tail.size(), tail) == 0;
    }

    void keep(const std::string &name, const struct ggml_tensor *tensor) {
        std::vector<float> values(ggml_nelements(tensor));
        ggml_backend_tensor_get(tensor, values.data(), 0, ggml_nbytes(tensor));
        int64_t columns = tensor->ne[0], rows = ggml_nelements(tensor) / columns, depth = 0;
        if (ends_with(name, "hook_pattern") && !in_one_call) return;
        if (ends_with(name, "hook_pattern")) {  // (heads, padded tokens, cache) -> (heads, N, N)
            std::vector<float> cut;
            depth = tensor->ne[2];
            for (int64_t h = 0; h < depth; h++)
                for (int64_t i = 0; i < n_tokens; i++) {
                    const float *row = &values[(h * tensor->ne[1] + i) * columns];
                    cut.insert(cut.end(), row, row + n_tokens);
                }
            values.swap(cut);
            rows = columns = n_tokens;
        } else if (ends_with(name, "hook_rot_q") || ends_with(name, "hook_rot_k") ||
                   (ends_with(name, "_norm.hook_normalized") && !ends_with(name, "sub_norm.hook_normalized"))) {
            columns *= tensor->ne[1], rows /= tensor->ne[1];  // heads joined
        }
        for (int k = 0; k < 2; k++) {
            bool is_this = ends_with(name, k ? "k_proj.hook_out" : "q_proj.hook_out") || ends_with(name, k ? "rot_k" : "rot_q");
            if (heads[k] && is_this) to_halves(values, columns / heads[k]);
        }
        now[name] = {depth, rows, columns, std::move(values)};
    }

    // After each call: its rows come below those of the calls before.
    void end_call() {
        for (auto &[name, t] : now) {
            Tensor &whole = seen[name];
            if (whole.values.empty()) {
                whole = std::move(t);
            } else {
                whole.rows += t.rows;
                whole.values.insert(whole.values.end(), t.values.begin(), t.values.end());
            }
        }
        now.clear();
    }

    static void to_halves(std::vector<float> &values, int64_t head_dim) {
        std::vector<float> head(head_dim);
        for (size_t start = 0; start < values.size(); start += head_dim) {
            for (int64_t i = 0; i < head_dim; i++) head[(i % 2) * (head_dim / 2) + i / 2] = values[start + i];
            std::copy(head.begin(), head.end(), values.begin() + start);
        }
    }
};

static std::vector<int> read_numbers(char *at) {
    std::vector<int> numbers;
    for (char *end; *at; at = end + (*end == ',')) {
        numbers.push_back((int)strtol(at, &end, 10));
        if (end == at) fprintf(stderr, "expected numbers, such as 1,17,5: %s\n", at), exit(2);
    }
    return numbers;
}

int main(int argc, char **argv) {
    if (argc != 4 && argc != 5) return fprintf(stderr, "usage: %s MODEL.gguf OUT.safetensors 1,17,5 [2,1]\n", argv[0]), 2;
    std::vector<int> tokens = read_numbers(argv[3]), calls;
    if (argc == 5) calls = read_numbers(argv[4]);
    int n_calls = (int)calls.size(), total = 0;  // 0: one call, of which the trace need not tell
    if (calls.empty()) calls = {(int)tokens.size()};
    for (int size : calls) total += size;
    if (total != (int)tokens.size()) return fprintf(stderr, "the calls have %d tokens, not %zu\n", total, tokens.size()), 2;

    llama_backend_init();
    llama_model_params model_options = llama_model_default_params();
    llama_model *model = llama_model_load_from_file(argv[1], model_options);
    if (!model) return fprintf(stderr, "cannot load %s\n", argv[1]), 1;

    Recorder recorder;
    recorder.n_tokens = (int)tokens.size();
    recorder.in_one_call = calls.size() == 1;
    char architecture[64] = "";
    llama_model_meta_val_str(model, "general.architecture", architecture, sizeof architecture);
    if (std::string(architecture) == "llama") {
        recorder.heads[0] = llama_model_n_head(model), recorder.heads[1] = llama_model_n_head_kv(model);
    }
    llama_context_params options = llama_context_default_params();
    options.n_ctx = options.n_batch = options.n_ubatch = tokens.size() < 64 ? 64 : (uint32_t)tokens.size();
    options.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    options.type_k = options.type_v = GGML_TYPE_F32;
    options.cb_eval = Recorder::callback;
    options.cb_eval_user_data = &recorder;
    llama_context *context = llama_init_from_model(model, options);
    if (!context) return fprintf(stderr, "cannot make a context\n"), 1;

    llama_batch batch = llama_batch_init((int32_t)tokens.size(), 0, 1);
    int start = 0;
    for (int size : calls) {
        batch.n_tokens = size;
        for (int i = 0; i < size; i++) {
            batch.token[i] = tokens[start + i], batch.pos[i] = start + i, batch.n_seq_id[i] = 1, batch.logits[i] = true;
            batch.seq_id[i][0] = 0;
        }
        if (llama_decode(context, batch) != 0) return fprintf(stderr, "cannot decode the tokens\n"), 1;
        recorder.end_call();
        start += size;
    }

    struct trace trace;
    trace_begin_calls(&trace, argv[2], "llama.cpp", tokens.data(), (int)tokens.size(), calls.data(), n_calls, NULL, 0);
    for (const auto &[name, t] : recorder.seen)
        trace_add(&trace, name.c_str(), "F32", t.values.data(), t.depth, t.rows, t.columns);
    int failed = trace_end(&trace);
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    return failed ? 1 : 0;
}
