LAYERS="${MODEL_LAYERS:-36}"
for ((i=0; i<LAYERS; i++)); do
  kinds+=(1)   # what only a shell works out
done
printf -v KINDS "[%s]" "${kinds[*]}"
MODEL_ARGS=(
   --swiglu
   --num-layers $LAYERS
   --hidden-size 2560
   --normalization "RMSNorm"
   --rotary-base "${MODEL_BASE:-1000000}"
   --moe-layer-freq "$KINDS"
)
